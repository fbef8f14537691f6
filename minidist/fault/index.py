"""checkpoint.json: the index of a checkpoint.

    {"format": 1, "sha256": of the rest, "step": 100, "state": {...},
     "files": {"rank-00000.safetensors": {"sha256": ..., "bytes": ...}},
     "tensors": {"params/model.norm.weight": {"dtype": "float32", "shape": [64],
                 "boxes": [{"start": [0], "stop": [64], "file": "rank-00000.safetensors", "key": ...}]}}}

It holds the SHA-256 of every file and of itself, so that a flipped bit is detected before anything is loaded.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.errors import UserError
from minidist.fault.shards import DTYPES, SavedBox, SavedTensor
from minidist.parameters import Box

FORMAT = 1
NAME = "checkpoint.json"


class DamagedError(UserError):
    """The files of a checkpoint are missing, unreadable, or differ from those that were written."""


@dataclass(frozen=True)
class FileEntry:
    """The SHA-256 (hex) and the size in bytes of a checkpoint file."""

    sha256: str
    bytes: int

    @classmethod
    def of(cls, file: Path) -> "FileEntry":
        """Compute the entry of a file on disk."""
        with open(file, "rb") as stream:
            return cls(hashlib.file_digest(stream, "sha256").hexdigest(), file.stat().st_size)


@dataclass(frozen=True)
class Index:
    """The content of checkpoint.json.

    step: optimizer steps done. state: the JSON object given to `save_checkpoint`. sha256: of the index itself; ranks
    compare it to make sure that they read the same checkpoint.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, SavedTensor]
    sha256: str


def format_index(step: int, state: dict, files: dict[str, FileEntry], tensors: dict[str, SavedTensor]) -> str:
    """Return the text of checkpoint.json. Raises ValueError or TypeError if `state` is not valid JSON (as NaN)."""
    body = {
        "format": FORMAT,
        "step": step,
        "state": state,
        "files": {name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in sorted(files.items())},
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "boxes": [
                    {"start": stored.box.start, "stop": stored.box.stop, "file": stored.file, "key": stored.key}
                    for stored in tensor.boxes
                ],
            }
            for name, tensor in sorted(tensors.items())
        },
    }
    # JSON turns keys into strings and tuples into lists: hash the body as `parse_index` will read it.
    body = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps({"format": body.pop("format"), "sha256": _digest(body), **body})


def parse_index(path: Path) -> Index:
    """Read the index of the checkpoint in folder `path`. Raises DamagedError if it is missing or damaged."""
    file = path / NAME
    try:
        body = json.loads(file.read_bytes())
        found = body.pop("format")
        if found != FORMAT:
            raise DamagedError(f"{file} has format {found}; this version reads format {FORMAT}")
        sha256 = body.pop("sha256")
        if sha256 != (actual := _digest(body)):
            raise DamagedError(f"{file} is damaged: its sha256 is {actual}, it says {sha256}")
        files = {name: FileEntry(entry["sha256"], entry["bytes"]) for name, entry in body["files"].items()}
        tensors = {name: _tensor(entry) for name, entry in body["tensors"].items()}
        return Index(path, body["step"], body["state"], files, tensors, sha256)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is not the index of a checkpoint: {type(error).__name__}: {error}") from error


def find_damage(index: Index, names: Iterable[str]) -> list[str]:
    """Verify size and SHA-256 of files of the checkpoint; returns one message for each damaged file."""
    problems = []
    for name in names:
        file, expected = index.path / name, index.files[name]
        try:
            # The size is free to check, and a more helpful message than a checksum.
            if (size := file.stat().st_size) != expected.bytes:
                problems.append(f"{file} is damaged: it has {size:,} bytes, {expected.bytes:,} were written")
            elif (actual := FileEntry.of(file).sha256) != expected.sha256:
                problems.append(f"{file} is damaged: its sha256 is {actual}, {expected.sha256} was written")
        except FileNotFoundError:
            problems.append(f"{file} is missing ({expected.bytes:,} bytes were written)")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    return problems


def verify_checkpoint(path: Path) -> list[str]:
    """Verify every byte of the checkpoint in folder `path`; returns one message for each problem."""
    try:
        index = parse_index(path)
    except DamagedError as error:
        return [str(error)]
    return find_damage(index, index.files)


def _tensor(entry: dict) -> SavedTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']}")
    boxes = tuple(
        SavedBox(Box(tuple(box["start"]), tuple(box["stop"])), box["file"], box["key"]) for box in entry["boxes"]
    )
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), boxes)


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
