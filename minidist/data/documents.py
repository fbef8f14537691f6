"""Read text files as documents, in the same order on every machine, and split them into training and held-out."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from minidist.errors import UserError

NOT_SOURCES = ("site-packages", "dist-packages", "__pycache__")
_OTHERWISE = "Give a UTF-8 text file or a folder of them, or leave --data.path out to use the Python standard library."


class Document(NamedTuple):
    """The content of one text file."""

    name: str  # path relative to the root, with forward slashes on every machine
    content: bytes


def read_python_sources(root: str | Path) -> list[Document]:
    """Return every .py file below `root` except installed packages, ordered by name; UserError if there is none."""
    paths = [path for path in _files(root, skip=NOT_SOURCES) if path.suffix == ".py"]
    documents, _ = _read(paths, Path(root))
    if not documents:
        raise UserError(f"There is no Python source below {root} (a zipped or stripped installation?). {_OTHERWISE}")
    return documents


def read_text_files(path: str | Path) -> list[Document]:
    """Return the text file at `path`, or every UTF-8 text file below that folder which is not hidden.

    Raises UserError if the path is missing, unreadable, empty, or holds no text.
    """
    if not os.fspath(path):  # Path("") would be the current folder
        raise UserError(f"--data.path is given but empty. {_OTHERWISE}")
    path = Path(os.path.expanduser(path))
    if os.path.isfile(path):  # unlike Path.is_file, returns False if a parent folder may not be entered
        return [_one_file(path)]
    if not os.path.isdir(path):
        missing = f"does not exist or is out of reach (looked in {Path.cwd()})"
        fault = "is neither a file nor a folder" if os.path.exists(path) else missing
        raise UserError(f"--data.path {path} {fault}. {_OTHERWISE}")
    found = [p for p in _files(path) if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    read, unreadable = _read(found, path)
    documents = [d for d in read if d.content and _not_text(d.content) is None]
    if not documents:
        empty = sum(not d.content for d in read)
        binary = len(read) - empty
        raise UserError(
            f"--data.path {path} holds no text: {len(found)} files, of which {empty} are empty, {binary} are not "
            f"UTF-8 text and {unreadable} cannot be read. {_OTHERWISE}"
        )
    return documents


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out documents: by file if possible, else by position in each file.

    By file: files are held out in the order of a hash of their names, which is independent of their content, until 5 %
    of the bytes are held out. Files larger than 1 % of all bytes are never held out, as one of them would dominate the
    held-out loss. If the remaining files are too few, the last 10 % of every document is held out instead.
    """
    total = sum(len(d.content) for d in documents)
    chosen, size = set(), 0
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
    return hashlib.sha256(os.fsencode(document.name)).digest()


def _files(root: str | Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """Regular files below `root`. Links to folders are not followed, so a link to a parent cannot loop."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip]
        found += [
            path for name in names if os.path.isfile(path := Path(folder, name))
        ]  # no pipe or socket: reading hangs
    return found


def _read(paths: list[Path], root: Path) -> tuple[list[Document], int]:
    """Return the readable documents, ordered by name, and the number of unreadable ones."""
    documents, unreadable = [], 0
    for path in paths:
        try:
            documents.append(Document(path.relative_to(root).as_posix(), path.read_bytes()))
        except OSError:
            unreadable += 1
    return sorted(documents), unreadable


def _one_file(path: Path) -> Document:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--data.path {path} cannot be read: {error.strerror}. {_OTHERWISE}") from error
    if not content:
        raise UserError(f"--data.path {path} is empty (0 bytes). {_OTHERWISE}")
    if (fault := _not_text(content)) is not None:
        raise UserError(f"--data.path {path} ({len(content)} bytes) is not UTF-8 text: {fault}. {_OTHERWISE}")
    return Document(path.name, content)


def _not_text(content: bytes) -> str | None:
    """Return why `content` is not UTF-8 text, or None if it is. Zero bytes are refused: they separate documents."""
    if (zero := content.find(0)) >= 0:
        return f"byte {zero} is 0, as in a binary file"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is 0x{content[error.start]:02x}"
    return None
