"""Read text files as documents, in the same order on every machine, and split them into training and held-out."""

import codecs
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from minidist.errors import UserError, format_count

_BLOCK_BYTES = 1 << 20
NOT_SOURCES = ("site-packages", "dist-packages", "__pycache__")
_OTHERWISE = "Give a UTF-8 text file or a folder of them, or leave --data.path out to use the Python standard library."


class Document(NamedTuple):
    """One text file. name: its path relative to the folder read, with forward slashes on every machine."""

    name: str
    content: bytes


def read_python_sources(root: str | Path) -> list[Document]:
    """Return every .py file below `root`, without installed packages, sorted by name. UserError if there is none."""
    paths = [path for path in _list_files(root, skip=NOT_SOURCES) if path.suffix == ".py"]
    documents, _ = _read_documents(paths, Path(root))
    if not documents:
        raise UserError(f"There is no Python source below {root} (a zipped or stripped installation?). {_OTHERWISE}")
    return documents


def read_text_files(path: str | Path) -> tuple[list[Document], str]:
    """Return the text file at `path`, or every UTF-8 text file below that folder, hidden ones excepted.

    Also returns a sentence about the files of the folder that are left out because they are not UTF-8 text or cannot be
    read: how many, and the first of each kind; "" if there are none. Empty files are left out without a word. Raises
    UserError if the path is missing, unreadable, empty, or holds no text.
    """
    if not os.fspath(path):  # Path("") would be the current folder
        raise UserError(f"--data.path is given but empty. {_OTHERWISE}")
    path = Path(os.path.expanduser(path))
    if os.path.isfile(path):  # unlike Path.is_file, returns False if a parent folder may not be entered
        return [_read_single_file(path)], ""
    if not os.path.isdir(path):
        missing = f"does not exist or is out of reach (looked in {Path.cwd()})"
        fault = "is neither a file nor a folder" if os.path.exists(path) else missing
        raise UserError(f"--data.path {path} {fault}. {_OTHERWISE}")
    found = [p for p in _list_files(path) if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    read, unreadable = _read_documents(found, path)
    faults = {d.name: _find_non_text(d.content) for d in read}
    documents = [d for d in read if d.content and faults[d.name] is None]
    binary = [f"{name} ({fault})" for name, fault in faults.items() if fault is not None]
    if not documents:
        empty = sum(not d.content for d in read)
        raise UserError(
            f"--data.path {path} holds no text: of {format_count(len(found), 'file')}, {empty} empty, {len(binary)} "
            f"not UTF-8 text, {len(unreadable)} unreadable. {_OTHERWISE}"
        )
    reasons = {"not UTF-8 text": binary, "unreadable": unreadable}
    parts = [f"{len(files)} {reason}, first {files[0]}" for reason, files in reasons.items() if files]
    left_out = f"--data.path {path}: {len(binary) + len(unreadable)} of {len(found)} files are left out: "
    return documents, left_out + "; ".join(parts) if parts else ""


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out documents: by file if possible, else by position in each file.

    By file: files are held out in the order of a hash of their names, which is independent of their content, until 5 %
    of the bytes are held out. Files larger than 1 % of all bytes are never held out, as one of them would dominate the
    held-out loss. If the remaining files are too few, the last 10 % of every document is held out instead.
    """
    total = sum(len(d.content) for d in documents)
    chosen = set()
    size = 0
    for document in sorted(documents, key=_name_hash):
        if len(document.content) <= total // 100:
            chosen.add(document.name)
            size += len(document.content)
        if size * 20 >= total:
            return [d for d in documents if d.name not in chosen], [d for d in documents if d.name in chosen]
    train, held_out = [], []
    for name, content in documents:
        cut = len(content) - len(content) // 10
        train.append(Document(name, content[:cut]))
        held_out.append(Document(name, content[cut:]))
    return train, held_out


def _name_hash(document: Document) -> bytes:
    """Return the hash of a document's name by which documents are chosen to be held out."""
    return hashlib.sha256(os.fsencode(document.name)).digest()


def _list_files(root: str | Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """Return the regular files below `root`, without the folders named in `skip`.

    Links to folders are not followed, so a link to a parent cannot loop.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip]
        found += [path for name in names if os.path.isfile(path := Path(folder, name))]  # reading a pipe would hang
    return found


def _read_documents(paths: list[Path], root: Path) -> tuple[list[Document], list[str]]:
    """Return the readable documents, ordered by name, and the unreadable ones: their names, with the reason."""
    documents = []
    unreadable = []
    read_bytes = 0
    for path in paths:
        name = path.relative_to(root).as_posix()
        try:
            content = _read_content(path, read_bytes)
        except OSError as error:
            unreadable.append(f"{name} ({error.strerror})")
            continue
        read_bytes += len(content)
        documents.append(Document(name, content))
    return sorted(documents), sorted(unreadable)


def _read_content(path: Path, read_bytes: int = 0) -> bytes:
    """Return the content of a file; only its first block if that shows that the file is not text.

    read_bytes: the number of bytes already read from other files. Raises UserError, before it reads the file, if it is
    too large for the memory of this machine.
    """
    with path.open("rb") as file:
        first = file.read(_BLOCK_BYTES)
        if _find_non_text(first, is_whole=False) is not None:
            return first
        size = read_bytes + os.fstat(file.fileno()).st_size
        # Each rank holds the text, and twice while it reads it.
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        if size > limit:
            raise UserError(
                f"--data.path: with {path}, the text has at least {size:,} bytes; each rank holds all of it in memory, "
                f"so at most a quarter of this machine's memory, {limit:,} bytes, can be used. Give less text."
            )
        return first + file.read()


def _read_single_file(path: Path) -> Document:
    """Return the text file at `path`. Raises UserError if it is unreadable, empty or not UTF-8 text."""
    try:
        content = _read_content(path)
    except OSError as error:
        raise UserError(f"--data.path {path} cannot be read: {error.strerror}. {_OTHERWISE}") from error
    if not content:
        raise UserError(f"--data.path {path} is empty (0 bytes). {_OTHERWISE}")
    if (fault := _find_non_text(content)) is not None:
        raise UserError(f"--data.path {path} ({path.stat().st_size} bytes) is not UTF-8 text: {fault}. {_OTHERWISE}")
    return Document(path.name, content)


def _find_non_text(content: bytes, is_whole: bool = True) -> str | None:
    """Return why `content` is not UTF-8 text, or None if it is. Zero bytes are refused: they separate documents.

    is_whole: if False, `content` is the beginning of a file, which may end within a character.
    """
    if (zero := content.find(0)) >= 0:
        return f"byte {zero} is 0, as in a binary file"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is 0x{content[error.start]:02x}"
    return None
