"""Write a safetensors file and its SHA-256 in one pass over the tensors' memory.

safetensors' own `save_file` would leave the hash to a second pass that reads the file back from disk.
Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from minidist.fault.index import FileEntry

_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensor_file(file: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors to a safetensors file and wait until it is on disk; returns its SHA-256 and size.

    tensors: contiguous, in host memory. A second thread hashes the bytes while this one writes them: hashing releases
    the interpreter lock. Raises OSError if the file cannot be written.
    """
    # By falling element size, so that every tensor starts at a multiple of its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    chunks = [_header(ordered), *(_as_bytes(tensor) for _, tensor in ordered)]
    with ThreadPoolExecutor(1) as hasher, open(file, "wb", buffering=0) as stream:
        digest = hasher.submit(_hash, chunks)
        for chunk in chunks:
            _write_all(stream.fileno(), chunk)
        os.fsync(stream.fileno())
        return FileEntry(digest.result(), sum(map(len, chunks)))


def _header(ordered: list[tuple[str, Tensor]]) -> memoryview:
    """The length of the JSON header as 8 bytes, little-endian, and the header, padded with spaces to 8 bytes."""
    entries, start = {}, 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _as_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous tensor as bytes."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _hash(chunks: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _write_all(descriptor: int, chunk: memoryview) -> None:
    """Write all bytes; a system call writes 2 GiB at most."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
