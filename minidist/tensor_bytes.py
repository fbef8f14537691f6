"""The bytes of a tensor, to hash, save or send them whatever the dtype."""

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's elements, in row-major order: (n,) uint8. A view if the tensor is contiguous.

    Only a flat tensor whose stride is 1 has a view of its bytes. A contiguous tensor of one element may have any
    strides, as a slice `x[:1, ::8]` has, and `view(-1)` keeps them.
    """
    tensor = tensor.detach().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
