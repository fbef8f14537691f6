"""Validation of a checkpoint's index, which may come from anyone: it must describe files of its own folder only.

A SHA-256 shows that bytes are those that were written, not that whoever wrote them meant well: an edited index carries
the SHA-256 of its edited text. So everything that a load uses is checked before a file is opened. Refused are file
names that would lead out of the folder, devices and pipes, which have no end, sizes that do not match the boxes, and
boxes outside of their tensor.
"""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.checkpoint.shards import DTYPES, SavedPart, SavedTensor, check_covered

if TYPE_CHECKING:
    from minidist.checkpoint.index import Index

MAX_INDEX_BYTES = 1 << 30
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its format
_MAX_DIMENSIONS = 64
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"step-(\d{8,})(\.replaced)?")


def read_json_object(file: Path, max_bytes: int = MAX_INDEX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a regular file. NaN, infinities and repeated names are errors.

    Raises ValueError if the file holds something else or more than `max_bytes`, OSError if it cannot be read.
    """
    if (size := regular_file_size(file)) > max_bytes:
        raise ValueError(f"it has {size:,} bytes, and an index has {max_bytes:,} at most")
    try:
        body = json.loads(file.read_bytes(), object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError(f"it holds a {type(body).__name__}, not an object")
    return body


def regular_file_size(file: Path) -> int:
    """Return the size of a regular file in bytes; raise OSError for a device, a pipe or a folder.

    Opening a pipe may block for ever, and a device like /dev/zero has no end.
    """
    if not stat.S_ISREG((status := os.stat(file)).st_mode):
        raise OSError(0, "it is not a regular file")
    return status.st_size


def check_index(index: "Index") -> None:
    """Raise ValueError unless `format_index` could have written this index into the folder `index.path`.

    Checks types and ranges of all values, file names, that folder and index have the same step, that each element of a
    tensor is in exactly one box, and that every file has the size of the boxes in it.
    """
    if not is_count(index.step):
        raise ValueError(f"its step is {_shorten(index.step)}, not a whole number of at least 0")
    if (match := _FOLDER.fullmatch(index.path.resolve().name)) and int(match[1]) != index.step:
        raise ValueError(f"its step is {index.step}, and its folder is called {index.path.resolve().name}")
    if not isinstance(index.state, dict):
        raise ValueError(f"its state is {_shorten(index.state)}, not an object")
    for name, entry in index.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{_shorten(name)} is no name of a file in this folder")
        if not isinstance(entry.checksum, str) or not _CHECKSUM.fullmatch(entry.checksum):
            raise ValueError(f"the checksum of {name} is {_shorten(entry.checksum)}, not 64 hexadecimal digits")
        if not is_count(entry.num_bytes):
            raise ValueError(f"the size of {name} is {_shorten(entry.num_bytes)}, not a number of bytes")
    used = dict.fromkeys(index.files, 0)
    for name, tensor in index.tensors.items():
        _check_tensor(name, tensor)
        for part in tensor.parts:
            numel = math.prod(map(int.__sub__, *reversed(_bounds_and_shape(part, tensor.shape)[0])))
            used[part.file] += numel * DTYPES[tensor.dtype_name].itemsize
    for name, num_bytes in used.items():
        if not num_bytes < index.files[name].num_bytes <= num_bytes + _MAX_HEADER_BYTES:
            raise ValueError(f"{name} has {index.files[name].num_bytes:,} bytes, and its boxes hold {num_bytes:,}")


def is_count(value: Any) -> bool:
    """Whether a value read from JSON is a whole number of at least 0 that fits 64 bits; True and 1.0 are not."""
    return type(value) is int and 0 <= value < 1 << 63


def _check_tensor(name: str, tensor: SavedTensor) -> None:
    """Raise ValueError unless name, dtype, shape and parts of a tensor are valid and cover each element once."""
    if not name.isprintable():  # messages print names, and a terminal would obey a control character
        raise ValueError(f"{_shorten(name)} is no name of a tensor: not all of its characters can be printed")
    if tensor.dtype_name not in DTYPES:
        raise ValueError(f"{_shorten(name)} has the unknown dtype {_shorten(tensor.dtype_name)}")
    if len(tensor.shape) > _MAX_DIMENSIONS or not all(map(is_count, tensor.shape)):
        raise ValueError(f"{_shorten(name)} has the shape {_shorten(list(tensor.shape))}")
    for part in tensor.parts:
        (start, stop), limits = _bounds_and_shape(part, tensor.shape)
        inside = len(start) == len(stop) == len(limits) and all(map(is_count, (*start, *stop)))
        if not inside or not all(a < b <= n for a, b, n in zip(start, stop, limits, strict=True)):
            bounds = f"from {_shorten(list(start))} to {_shorten(list(stop))}"
            raise ValueError(
                f"{_shorten(name)} has shape {_shorten(list(tensor.shape))}, and a part of it goes {bounds}"
            )
    check_covered(name, tensor)


def _bounds_and_shape(part: SavedPart, shape: tuple[int, ...]) -> tuple:
    """Return ((start, ...), (stop, ...)) of a part and the shape that bounds them: one dimension for a flat range."""
    if isinstance(part.start, tuple) and isinstance(part.stop, tuple):
        return (part.start, part.stop), shape
    return ((part.start,), (part.stop,)), (math.prod(shape),)


def _refuse_constant(name: str) -> None:
    """JSON hook: raise ValueError for NaN and infinities."""
    raise ValueError(f"it contains {name}, which JSON does not have")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON hook: return the pairs of an object as a dict. Raises ValueError if a name occurs twice."""
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            raise ValueError(f"it has the name {_shorten(name)} twice")
        names[name] = value
    return names


def _shorten(value: Any) -> str:
    """Show a value in a message, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
