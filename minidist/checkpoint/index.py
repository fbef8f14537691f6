"""checkpoint.json: the index of a checkpoint.

    {"format": 2, "sha256": of the rest, "step": 100, "state": {...}, "checksum": "sha256 of sha256 per 8 MiB",
     "files": {"rank-00000.safetensors": {"checksum": ..., "bytes": ...}},
     "partitions": [[[0, 0, 4096]], [[0, [0, 0], [8, 4]], [1, [0, 4], [8, 8]]]],
     "tensors": {"params/model.norm.weight": {"dtype": "float32", "shape": [4096], "partition": 0}}}

A partition lists the parts of tensors that are sharded the same way: [file, start, stop], the file as a position among
the sorted names of `files`, the limits as in `SavedPart`. ZeRO shards a parameter, its moments and the same parameter
of all other layers the same way, so the index hardly grows with their number.

It holds the checksum of every file (`checksum.py`) and its own SHA-256, so that a flipped bit is detected before
anything is loaded.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.checkpoint.checksum import SCHEME, compute_file_checksum
from minidist.checkpoint.index_validation import check_index, is_count, read_json_object, regular_file_size
from minidist.checkpoint.shards import SavedPart, SavedTensor
from minidist.errors import DamagedError

FORMAT = 2
INDEX_NAME = "checkpoint.json"


@dataclass(frozen=True)
class FileEntry:
    """The checksum (`checksum.py`) and the size in bytes of a checkpoint file."""

    checksum: str
    num_bytes: int

    @classmethod
    def from_file(cls, file: Path) -> "FileEntry":
        """Return the entry of a file on disk, which is read in full."""
        return cls(compute_file_checksum(file), file.stat().st_size)


@dataclass(frozen=True)
class Index:
    """The content of checkpoint.json.

    path: the checkpoint's folder. step: number of completed steps. state: the JSON object given to `save_checkpoint`.
    files: checksum and size of each file, by name. tensors: where each tensor is saved, by names like
    `params/model.norm.weight`. sha256: of the index itself; the ranks compare it to make sure that they read the same
    checkpoint.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, SavedTensor]
    sha256: str


def format_tensors(tensors: dict[str, SavedTensor]) -> dict[str, Any]:
    """Return the JSON entries `partitions` and `tensors` of checkpoint.json. They depend on the layout only."""
    files = {part.file for tensor in tensors.values() for part in tensor.parts}
    file_numbers = {file: number for number, file in enumerate(sorted(files))}
    partitions: dict[tuple, int] = {}
    entries = {}
    for name, tensor in sorted(tensors.items()):
        parts = tuple((file_numbers[part.file], part.start, part.stop) for part in tensor.parts)
        number = partitions.setdefault(parts, len(partitions))
        entries[name] = {"dtype": tensor.dtype_name, "shape": tensor.shape, "partition": number}
    return {"partitions": list(partitions), "tensors": entries}


def format_index(step: int, state: dict, files: dict[str, FileEntry], tensors: dict[str, Any]) -> str:
    """Return the text of checkpoint.json. tensors: from `format_tensors`; other arguments: fields of `Index`.

    Raises ValueError or TypeError if `state` cannot be written as JSON, for example because it contains NaN.
    """
    body = {
        "format": FORMAT,
        "step": step,
        "state": state,
        "checksum": SCHEME,
        "files": {
            name: {"checksum": entry.checksum, "bytes": entry.num_bytes} for name, entry in sorted(files.items())
        },
        **tensors,
    }
    # JSON turns keys into strings and tuples into lists: hash the body as `read_index_file` will read it.
    body = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps({"format": body.pop("format"), "sha256": _hash_body(body), **body}, separators=(",", ":"))


def read_index_file(path: Path) -> Index:
    """Read the index of the checkpoint in folder `path`.

    Raises DamagedError if the index is missing or damaged, or does not match the folder (`check_index`).
    """
    file = path / INDEX_NAME
    try:
        body = read_json_object(file)
        version = body.pop("format")
        if version != FORMAT:
            raise DamagedError(f"{file} has format {version}; this version reads format {FORMAT}")
        if (scheme := body["checksum"]) != SCHEME:
            raise DamagedError(f"{file} has checksums of the kind {scheme!r}; this version reads {SCHEME!r}")
        sha256 = body.pop("sha256")
        if sha256 != (actual := _hash_body(body)):
            raise DamagedError(f"{file} is damaged: its sha256 is {actual}, it says {sha256}")
        files = {name: FileEntry(entry["checksum"], entry["bytes"]) for name, entry in body["files"].items()}
        names = sorted(files)
        partitions = [tuple(_parse_part(names, *part) for part in parts) for parts in body["partitions"]]
        tensors = {
            name: SavedTensor(each["dtype"], tuple(each["shape"]), _look_up(partitions, each["partition"], "partition"))
            for name, each in body["tensors"].items()
        }
        index = Index(path, body["step"], body["state"], files, tensors, sha256)
        check_index(index)
        return index
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedError(f"{file} is not the index of a checkpoint: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is not the index of a checkpoint: {type(error).__name__}: {error}") from error


def find_damaged_files(index: Index, names: Iterable[str]) -> list[str]:
    """Verify size and checksum of the checkpoint's files `names`; return a message for each damaged or missing file."""
    problems = []
    for name in names:
        file = index.path / name
        expected = index.files[name]
        try:
            # The size is free to check, and a more helpful message than a checksum.
            if (size := regular_file_size(file)) != expected.num_bytes:
                problems.append(f"{file} is damaged: it has {size:,} bytes, {expected.num_bytes:,} were written")
            elif (actual := FileEntry.from_file(file).checksum) != expected.checksum:
                problems.append(f"{file} is damaged: its checksum is {actual}, {expected.checksum} was written")
        except FileNotFoundError:
            problems.append(f"{file} is missing ({expected.num_bytes:,} bytes were written)")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    return problems


def verify_checkpoint(path: Path) -> list[str]:
    """Verify every byte of the checkpoint in folder `path`; return a message for each problem, [] if it is intact."""
    try:
        index = read_index_file(path)
    except DamagedError as error:
        return [str(error)]
    return find_damaged_files(index, index.files)


def _parse_part(names: list[str], file: int, start: int | list, stop: int | list) -> SavedPart:
    """Return a part as read from JSON: the number of its file in `names`, and its start and stop."""
    limits = (tuple(limit) if isinstance(limit, list) else limit for limit in (start, stop))
    return SavedPart(*limits, _look_up(names, file, "file"))


def _look_up(entries: list, number: int, what: str) -> Any:
    """Return `entries[number]`. Raises ValueError unless `number` is a valid index. what: names the entry."""
    if not is_count(number) or number >= len(entries):
        raise ValueError(f"it refers to {what} {str(number)[:60]!r} of {len(entries)}")
    return entries[number]


def _hash_body(body: dict) -> str:
    """Return the SHA-256 (hex) of the index without its entries "format" and "sha256"."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
