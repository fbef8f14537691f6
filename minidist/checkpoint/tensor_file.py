"""Write a safetensors file and compute its checksum in one pass over the tensors' memory.

`safetensors.torch.save_file` would leave the checksum to a second pass that reads the file back from disk.
Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from minidist.checkpoint.checksum import BLOCK_BYTES, combine_block_digests, run_on_threads
from minidist.checkpoint.index import FileEntry
from minidist.checkpoint.shards import DTYPES
from minidist.tensor_bytes import tensor_bytes

# The format's names of dtypes.
_FORMAT_NAMES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
FORMAT_NAMES = dict(zip(DTYPES.values(), _FORMAT_NAMES, strict=True))


def write_tensor_file(file: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors to a safetensors file and wait until it is on disk; return its checksum and size.

    tensors: contiguous, in host memory. Threads write the blocks and compute their checksums. Raises OSError if the
    file cannot be written.
    """
    # By falling element size, so that every tensor starts at a multiple of its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    chunks = [_make_header(ordered), *(memoryview(tensor_bytes(tensor).numpy()) for _, tensor in ordered)]
    with open(file, "wb", buffering=0) as stream:
        blocks = enumerate(_divide_into_blocks(chunks))
        digests = run_on_threads(lambda block: _write_block(stream.fileno(), *block), blocks)
        os.fsync(stream.fileno())
    return FileEntry(combine_block_digests(digests), sum(map(len, chunks)))


def _make_header(ordered: list[tuple[str, Tensor]]) -> memoryview:
    """Return the file's first bytes: the JSON header's length (8 bytes, little-endian) and the header, space-padded."""
    entries = {}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _divide_into_blocks(chunks: Iterable[memoryview]) -> list[list[memoryview]]:
    """Divide chunks, which follow one another in a file, into blocks of BLOCK_BYTES; the last may be shorter."""
    blocks = []
    free = 0
    for chunk in chunks:
        while chunk:
            if not free:
                blocks.append([])
                free = BLOCK_BYTES
            blocks[-1].append(chunk[:free])
            chunk = chunk[free:]
            free -= len(blocks[-1][-1])
    return blocks


def _write_block(descriptor: int, number: int, parts: list[memoryview]) -> bytes:
    """Write the parts of block `number` one after another and return the SHA-256 digest of the block."""
    digest = hashlib.sha256()
    start = number * BLOCK_BYTES
    for part in parts:
        digest.update(part)
        while part:  # a system call may write less than asked for
            count = os.pwrite(descriptor, part, start)
            part = part[count:]
            start += count
    if hasattr(os, "posix_fadvise"):  # Linux: begin to write the block to disk now, not only in fsync
        os.posix_fadvise(descriptor, number * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    return digest.digest()
