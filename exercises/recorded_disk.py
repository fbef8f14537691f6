"""A disk in memory that records every change, and the states in which a crash can leave it.

It models what POSIX promises: a rename is atomic, and nothing is on disk before it has been synced, neither the bytes
of a file nor the entry of its folder. The format of the checkpoints is that of `minidist/simple/checkpoint.py`.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PosixPath
from unittest import mock

import torch
from safetensors.torch import load, save

from exercises.testing import Answer, Wrong, learner_globals
from minidist.simple import checkpoint

Change = tuple[int, str, tuple]
INDEX = "checkpoint.json"
_ROOT = "/recorded"
_BLOCK = 8 * 2**20


class RecordedDisk:
    """A disk in memory, whose files an answer reaches by paths below `root`.

    files: the contents at the start, by name, like "step-00000003/checkpoint.json". clock: returns increasing numbers,
    in one order for all ranks. failing: pairs of an operation and the end of a name, as ("write", ".safetensors"), for
    which it raises OSError. changes: (time, operation, arguments) so far.
    """

    def __init__(
        self, files: Mapping[str, bytes], clock: Callable[[], int] | None = None, failing: Sequence[tuple] = ()
    ):
        self.files, self.failing = dict(files), list(failing)
        self.changes: list[Change] = []
        self._clock = clock or (lambda: len(self.changes))
        self.root = type("RecordedPath", (_RecordedPath,), {"disk": self})(_ROOT)

    def write(self, name: str, data: bytes) -> None:
        """Write a file; its bytes may be lost in a crash until `sync`."""
        self._record_change("write", name, bytes(data))
        self.files[name] = bytes(data)

    def sync(self, name: str) -> None:
        """Make the bytes of a file, or the entries of a folder, survive a crash."""
        self._record_change("sync", name)

    def mkdir(self, name: str, exist_ok: bool) -> None:
        """Record that a folder is made."""
        self._record_change("mkdir", name, exist_ok)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder. Raises OSError if `new` is a folder with entries."""
        if any(name.startswith(f"{new}/") for name in self.files):
            raise OSError(f"{new} is a folder with entries")
        self._record_change("rename", old, new)
        self.files = {_rename_path(name, old, new): data for name, data in self.files.items()}

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all its entries; do nothing if there is none."""
        if any(_is_inside(file, name) for file in self.files):
            self._record_change("remove", name)
            self.files = {file: data for file, data in self.files.items() if not _is_inside(file, name)}

    def _record_change(self, operation: str, name: str, *more) -> None:
        """Record a change; raise OSError instead if this disk fails here."""
        for failing, end in self.failing:
            if operation == failing and name.endswith(end):
                raise OSError(f"{operation} of {name}: no space left on the disk")
        self.changes.append((self._clock(), operation, (name, *more)))


class _RecordedPath(PosixPath):
    """A path whose methods act on a recorded disk."""

    disk: RecordedDisk

    @property
    def name_on_disk(self) -> str:
        """The path relative to the root of the disk."""
        return str(self).removeprefix(_ROOT).removeprefix("/")

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        self.disk.mkdir(self.name_on_disk, exist_ok)

    def write_bytes(self, data: bytes) -> int:
        self.disk.write(self.name_on_disk, data)
        return len(data)

    def write_text(self, data: str, *_, **__) -> int:
        return self.write_bytes(data.encode())

    def read_bytes(self) -> bytes:
        return self.disk.files[self.name_on_disk]

    def rename(self, target: Path) -> Path:
        self.disk.rename(self.name_on_disk, type(self)(target).name_on_disk)
        return target

    replace = rename

    def exists(self, **_) -> bool:
        return not self.name_on_disk or any(_is_inside(file, self.name_on_disk) for file in self.disk.files)

    def is_dir(self, **_) -> bool:
        return self.exists() and self.name_on_disk not in self.disk.files

    def unlink(self, missing_ok: bool = False) -> None:
        self.disk.remove(self.name_on_disk)

    rmdir = unlink

    def iterdir(self) -> Iterator[Path]:
        start = f"{self.name_on_disk}/".removeprefix("/")
        inside = {file.removeprefix(start).split("/")[0] for file in self.disk.files if file.startswith(start)}
        return iter([self / name for name in sorted(inside)])


def _record_sync(path: _RecordedPath) -> None:
    """Sync a recorded path, in place of the package's `sync`."""
    path.disk.sync(path.name_on_disk)


def _record_removal(folder: _RecordedPath) -> None:
    """Remove a recorded folder, in place of the package's `remove_folder`."""
    folder.disk.remove(folder.name_on_disk)


@contextlib.contextmanager
def recorded_files(answer: Answer) -> Iterator[None]:
    """Let the package's `sync` and `remove_folder`, which the answer calls, act on recorded disks."""
    names = {"sync": _record_sync, "remove_folder": _record_removal}
    known = {name: each for name, each in names.items() if name in learner_globals(answer)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(learner_globals(answer), known))
        for name, each in names.items():
            stack.enter_context(mock.patch.object(checkpoint, name, each))
        yield


def merge_changes(changes_of_ranks: Sequence[Sequence[Change]]) -> list[tuple[str, tuple]]:
    """Return the changes of all ranks, in the order of the clock, as (operation, arguments).

    Raises Wrong for a file that is written before its folder has been made, and for a folder that is made twice.
    """
    ordered = sorted((change for changes in changes_of_ranks for change in changes), key=lambda change: change[0])
    folders: set[str] = set()
    for _, operation, (name, *more) in ordered:
        if operation == "mkdir":
            if name in folders and not more[0]:
                raise Wrong("wrong", f"the folder {name} is made although it exists: FileExistsError on a real disk")
            folders.add(name)
        elif operation == "remove":
            folders.discard(name)
        elif operation == "rename":
            folders.discard(name)
            folders.add(more[0])
        elif operation == "write" and (folder := name.rpartition("/")[0]) not in folders:
            raise Wrong("wrong", f"{name} is written before {folder} is made: FileNotFoundError on a real disk")
    return [(operation, arguments) for _, operation, arguments in ordered]


def crash_states(
    files: Mapping[str, bytes], changes: Sequence[tuple[str, tuple]]
) -> Iterator[tuple[str, dict[str, bytes], set[str]]]:
    """Yield what a disk may hold if the machine crashes after `changes`: (what was lost, files, folders).

    files: on disk before the first change. What is not synced may have reached the disk or not. If the last change
    removes a folder, half of its files may be left.
    """
    view, durable, entries = dict(files), dict(files), set(files)
    renames: list[tuple[str, str]] = []  # not yet synced
    folders: set[str] = set()
    for operation, (name, *more) in changes:
        if operation == "write":
            view[name] = more[0]
            durable.pop(name, None)
        elif operation == "mkdir":
            folders.add(name)
        elif operation == "sync" and name in view:
            durable[name] = view[name]
        elif operation == "sync":
            entries |= {file for file in view if file.rpartition("/")[0] == name}
            renames = renames if name else []
        elif operation == "remove":
            removed = [(file, data) for file, data in sorted(view.items()) if _is_inside(file, name)]
            view = {file: data for file, data in view.items() if not _is_inside(file, name)}
            folders.discard(name)
        elif operation == "rename":
            renames.append((name, more[0]))
            view = {_rename_path(file, name, more[0]): data for file, data in view.items()}
            durable = {_rename_path(file, name, more[0]): data for file, data in durable.items()}
            entries = {_rename_path(file, name, more[0]) for file in entries}
            folders = (folders - {name}) | {more[0]}
    lost = {
        "nothing was lost": view,
        "bytes that were not synced were lost": {
            name: durable.get(name, data[: len(data) // 2]) for name, data in view.items()
        },
        "entries of folders that were not synced were lost": {
            name: data for name, data in view.items() if name in entries
        },
    }
    if changes and changes[-1][0] == "remove":
        lost["half of the files of a removed folder were left"] = view | dict(removed[len(removed) // 2 :])
    for what, found in lost.items():
        yield what, found, folders
        undone, remaining = found, set(folders)
        for old, new in reversed(renames):
            undone = {_rename_path(name, new, old): data for name, data in undone.items()}
            remaining.discard(new)
        if renames:
            yield f"{what}, and a rename that was not synced did not happen", undone, remaining


def describe_checkpoint(files: Mapping[str, bytes], folders: set[str], folder: str, expected: Mapping) -> str:
    """Describe a checkpoint's folder on disk: "absent", "whole", or what is wrong with it.

    expected: its global tensors, by name.
    """
    inside = {name.removeprefix(f"{folder}/"): data for name, data in files.items() if name.startswith(f"{folder}/")}
    if not inside and folder not in folders:
        return "absent"
    if INDEX not in inside:
        return f"without {INDEX}"
    try:
        index = json.loads(inside[INDEX])
    except ValueError:
        return f"{INDEX} is not complete"
    digest, _ = index.pop("sha256"), index.pop("format")
    if _hash_index(index) != digest:
        return f"{INDEX} does not have its SHA-256"
    tensors = {}
    for file, entry in index["files"].items():
        if file not in inside:
            return f"without {file}"
        if _checksum(inside[file]) != entry["checksum"] or len(inside[file]) != entry["bytes"]:
            return f"{file} does not have the checksum and length in {INDEX}"
        tensors[file] = load(inside[file])
    if sorted(index["tensors"]) != sorted(expected):
        return f"with the tensors {sorted(index['tensors'])}"
    file_names = sorted(index["files"])
    for name, tensor in index["tensors"].items():
        found = torch.full(tensor["shape"], float("nan")).to(getattr(torch, tensor["dtype"]))
        counts = torch.zeros(tensor["shape"])
        for number, start, stop in index["partitions"][tensor["partition"]]:
            place = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            found[place] = tensors[file_names[number]][_format_box_key(name, start, stop)]
            counts[place] += 1
        if not (counts == 1).all():
            return f"{name} has elements that are saved {int(counts.min())} or {int(counts.max())} times"
        if found.dtype != expected[name].dtype or not torch.equal(found, expected[name]):
            return f"{name} has other values"
    return "whole"


def checkpoint_files(folder: str, tensors: Mapping[str, torch.Tensor], boxes: Mapping, state: dict) -> dict[str, bytes]:
    """Return the files of a checkpoint that one rank or many have saved.

    boxes: of each tensor, by name: a list of (rank, start, stop).
    """
    contents: dict[int, dict] = {rank: {} for each in boxes.values() for rank, _, _ in each}
    described, partitions = {}, []
    numbers = {rank: number for number, rank in enumerate(sorted(contents))}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        described[name] = {"dtype": kind, "shape": list(tensor.shape), "partition": len(partitions)}
        partitions.append([])
        for rank, start, stop in boxes[name]:
            place = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            contents[rank][_format_box_key(name, start, stop)] = tensor[place].clone().contiguous()
            partitions[-1].append([numbers[rank], list(start), list(stop)])
    files = {f"rank-{rank:05d}.safetensors": save(content) for rank, content in contents.items()}
    body = {
        "step": state.get("step", 0),
        "state": state,
        "checksum": "sha256 of sha256 per 8 MiB",
        "files": {file: {"checksum": _checksum(data), "bytes": len(data)} for file, data in files.items()},
        "tensors": described,
        "partitions": partitions,
    }
    files[INDEX] = json.dumps({"format": 2, "sha256": _hash_index(body), **body}).encode()
    return {f"{folder}/{file}": data for file, data in files.items()}


def _format_box_key(name: str, start: Sequence[int], stop: Sequence[int]) -> str:
    """Return the key of a box in a file: name and index ranges, such as "weight[0:2,0:4]"."""
    return f"{name}[{','.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"


def _checksum(data: bytes) -> str:
    """Return the checksum of a file as the package's checkpoints have it: a hash of the hashes of its blocks."""
    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


def _hash_index(body: Mapping) -> str:
    """Return the digest of an index's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_inside(file: str, folder: str) -> bool:
    """Return whether a path is `folder` or lies below it."""
    return file == folder or file.startswith(f"{folder}/")


def _rename_path(file: str, old: str, new: str) -> str:
    """Return the path after the renaming of `old` to `new`."""
    return new + file.removeprefix(old) if _is_inside(file, old) else file
