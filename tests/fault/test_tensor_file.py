"""Our writer of safetensors files, against the library's reader and hashlib."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from minidist.fault.shards import DTYPES
from minidist.fault.tensor_file import write_tensor_file


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
    assert entry.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


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
