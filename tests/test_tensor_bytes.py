"""Tests of minidist.tensor_bytes: NumPy's `tobytes` is the reference."""

import numpy as np
import pytest
import torch

from minidist.tensor_bytes import tensor_bytes
from minidist.tools.shm.tensor_views import byte_view

WHOLE = torch.arange(24.0).reshape(3, 8)
TENSORS = {
    "contiguous": WHOLE,
    "transposed": WHOLE.T,
    "every second element": WHOLE[:, ::2],
    "one strided element": WHOLE[1:2, ::8],
    "no dimensions": torch.tensor(3),
    "empty": WHOLE[:0],
    "a gradient is required": torch.ones(2, dtype=torch.float64, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_bytes_are_those_of_numpy(name):
    tensor = TENSORS[name]
    got = tensor_bytes(tensor)
    assert (got.dtype, got.dim()) == (torch.uint8, 1)
    assert got.numpy().tobytes() == np.asarray(tensor.tolist(), dtype=tensor.detach().numpy().dtype).tobytes()


def test_the_bytes_of_a_contiguous_tensor_are_a_view():
    tensor = torch.zeros(2)
    tensor_bytes(tensor)[3] = 0x3F
    tensor_bytes(tensor)[2] = 0x80
    assert tensor.tolist() == [1.0, 0.0]


def test_the_backend_shm_takes_one_strided_element():
    assert byte_view(TENSORS["one strided element"]).numpy().tobytes() == np.float32(8.0).tobytes()
