"""A disk in memory that records every change, and the states in which a crash can leave it.

It models what POSIX promises: a rename is atomic, and nothing is on disk before it has been synced, neither the bytes
of a file nor the entry of its folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from safetensors.torch import load, save

Change = tuple[int, str, tuple]


class RecordedDisk:
    """Has the methods of `minidist.fault.disk.Disk`. files: the contents at the start, by name.

    clock: returns increasing numbers, in one order for all ranks. failing: pairs of an operation and the end of a name,
    as ("write", ".safetensors"), for which it raises OSError. changes: (time, operation, arguments) so far. reads: the
    names that were read.
    """

    def __init__(
        self, files: Mapping[str, bytes], clock: Callable[[], int] | None = None, failing: Sequence[tuple] = ()
    ):
        self.files, self.failing = dict(files), list(failing)
        self.changes: list[Change] = []
        self.reads: list[str] = []
        self._clock = clock or (lambda: len(self.changes))

    def write(self, name: str, data: bytes) -> None:
        self._change("write", name, bytes(data))
        self.files[name] = bytes(data)

    def sync(self, name: str) -> None:
        self._change("sync", name)

    def rename(self, old: str, new: str) -> None:
        if any(name.startswith(f"{new}/") for name in self.files):
            raise OSError(f"{new} is a folder with entries")
        self._change("rename", old, new)
        self.files = {_moved(name, old, new): data for name, data in self.files.items()}

    def remove(self, name: str) -> None:
        self._change("remove", name)
        self.files = {file: data for file, data in self.files.items() if not _is_in(file, name)}

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def names(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.files})

    def _change(self, operation: str, name: str, *more) -> None:
        for failing, end in self.failing:
            if operation == failing and name.endswith(end):
                raise OSError(f"{operation} of {name}: no space left on the disk")
        self.changes.append((self._clock(), operation, (name, *more)))


def merge_changes(changes_of_ranks: Sequence[Sequence[Change]]) -> list[tuple[str, tuple]]:
    """Return the changes of all ranks, in the order of the clock, as (operation, arguments)."""
    ordered = sorted((change for changes in changes_of_ranks for change in changes), key=lambda change: change[0])
    return [(operation, arguments) for _, operation, arguments in ordered]


def crash_states(
    files: Mapping[str, bytes], changes: Sequence[tuple[str, tuple]]
) -> Iterator[tuple[str, dict[str, bytes], set[str]]]:
    """Yield what a disk may hold if the machine crashes after `changes`: (what was lost, files, folders).

    files: on disk before the first change. What is not synced may have reached the disk or not.
    """
    view, durable, entries = dict(files), dict(files), set(files)
    renames: list[tuple[str, str]] = []  # not yet synced
    folders: set[str] = set()
    for operation, (name, *more) in changes:
        if operation == "write":
            view[name] = more[0]
            durable.pop(name, None)
        elif operation == "sync" and name in view:
            durable[name] = view[name]
        elif operation == "sync":
            entries |= {file for file in view if file.rpartition("/")[0] == name}
            renames = renames if name else []
        elif operation == "remove":
            view = {file: data for file, data in view.items() if not _is_in(file, name)}
        elif operation == "rename":
            renames.append((name, more[0]))
            view = {_moved(file, name, more[0]): data for file, data in view.items()}
            durable = {_moved(file, name, more[0]): data for file, data in durable.items()}
            entries = {_moved(file, name, more[0]) for file in entries}
            folders.add(more[0])
    lost = {
        "nothing was lost": view,
        "bytes that were not synced were lost": {
            name: durable.get(name, data[: len(data) // 2]) for name, data in view.items()
        },
        "entries of folders that were not synced were lost": {
            name: data for name, data in view.items() if name in entries
        },
    }
    for what, found in lost.items():
        yield what, found, folders
        undone, remaining = found, set(folders)
        for old, new in reversed(renames):
            undone = {_moved(name, new, old): data for name, data in undone.items()}
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
    if "index.json" not in inside:
        return "without index.json"
    digest, _, body = inside["index.json"].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest.strip():
        return "index.json does not have the SHA-256 in its first line"
    index = json.loads(body)
    tensors = {}
    for file, digest in index["files"].items():
        if file not in inside:
            return f"without {file}"
        if hashlib.sha256(inside[file]).hexdigest() != digest:
            return f"{file} does not have its SHA-256"
        tensors[file] = load(inside[file])
    if sorted(index["tensors"]) != sorted(expected):
        return f"with the tensors {sorted(index['tensors'])}"
    for name, tensor in index["tensors"].items():
        found = torch.full(tensor["shape"], float("nan")).to(getattr(torch, tensor["dtype"]))
        counts = torch.zeros(tensor["shape"])
        for box in tensor["boxes"]:
            place = tuple(slice(a, b) for a, b in zip(box["start"], box["stop"], strict=True))
            found[place] = tensors[box["file"]][box["key"]]
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
    contents: dict[str, dict] = {}
    described = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        described[name] = {"dtype": kind, "shape": list(tensor.shape), "boxes": []}
        for rank, start, stop in boxes[name]:
            file, key = f"rank-{rank:05d}.safetensors", f"{name} from {list(start)}"
            place = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            contents.setdefault(file, {})[key] = tensor[place].clone().contiguous()
            described[name]["boxes"].append({"start": list(start), "stop": list(stop), "file": file, "key": key})
    files = {file: save(content) for file, content in contents.items()}
    digests = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    body = json.dumps({"state": state, "files": digests, "tensors": described}).encode()
    files["index.json"] = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    return {f"{folder}/{file}": data for file, data in files.items()}


def _is_in(file: str, folder: str) -> bool:
    return file == folder or file.startswith(f"{folder}/")


def _moved(file: str, old: str, new: str) -> str:
    return new + file.removeprefix(old) if _is_in(file, old) else file
