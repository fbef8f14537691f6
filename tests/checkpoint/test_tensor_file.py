"""Our writer of safetensors files, against the library's reader and an independent checksum."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from minidist.checkpoint.index import FileEntry
from minidist.checkpoint.shards import DTYPES
from minidist.checkpoint.tensor_file import write_tensor_file


def random_tensors():
    """A tensor per dtype, with sizes that no element size divides, and a scalar, an empty one and a matrix."""
    torch.manual_seed(0)
    tensors = {f"params/{name}[0:7]": torch.randint(0, 2, (7,)).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {"matrix": torch.randn(3, 5), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def test_the_library_reads_every_dtype_and_shape_back(tmp_path):
    file, tensors = tmp_path / "x.safetensors", random_tensors()
    entry = write_tensor_file(file, tensors)
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    assert found["scalar"] == 3.0
    assert entry.num_bytes == file.stat().st_size
    assert entry.checksum == checksum_of(file.read_bytes())


def checksum_of(data, block=8 * 2**20):
    """The documented checksum, from its definition."""
    digests = [hashlib.sha256(data[start : start + block]).digest() for start in range(0, len(data), block)]
    return hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.parametrize("more_bytes", [-1, 0, 1, 8 * 2**20 + 5])
def test_a_file_of_several_blocks_has_the_same_checksum_written_and_read(tmp_path, more_bytes):
    torch.manual_seed(0)
    small = {f"small{i}": torch.randint(0, 255, (i,), dtype=torch.uint8) for i in range(5)}
    file = tmp_path / "x.safetensors"
    write_tensor_file(file, small | {"w": torch.zeros(0, dtype=torch.uint8)})
    rest = 8 * 2**20 - file.stat().st_size - 6 + more_bytes  # "0" in the header becomes seven digits
    large = torch.randint(0, 255, (rest,), dtype=torch.uint8)
    entry = write_tensor_file(file, small | {"w": large})
    data = file.read_bytes()
    assert torch.equal(load_file(file)["w"], large) and entry.num_bytes == len(data)
    assert entry.checksum == checksum_of(data) == FileEntry.from_file(file).checksum
    damaged = bytearray(data)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert FileEntry.from_file(file).checksum == checksum_of(bytes(damaged)) != entry.checksum


def test_slices_are_read_from_an_aligned_file(tmp_path):
    file = tmp_path / "x.safetensors"
    write_tensor_file(file, {"odd": torch.ones(3, dtype=torch.uint8), "matrix": torch.arange(12.0).view(3, 4)})
    with safe_open(file, framework="pt") as stream:
        assert stream.get_slice("matrix")[1:3, 2:4].tolist() == [[6.0, 7.0], [10.0, 11.0]]


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        write_tensor_file(tmp_path / "missing" / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(OSError, match="No space left"):
        write_tensor_file("/dev/full", {"a": torch.ones(1)})
