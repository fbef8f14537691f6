"""An all-reduce that sends one byte per value: int8 numbers with a float32 scale for each block of 256 values.

After DeepSpeed's ZeRO++ (arXiv 2306.10209, sections 3.1 and 3.3): an all-to-all of quantized values, a sum in full
precision on the rank that owns a chunk, and an all-gather of the quantized sums. With error feedback (Seide et al.
2014; Karimireddy et al. 2019, arXiv 1901.09847): what a rank's messages leave out is added to what it sends next time.
"""

import torch
from torch import Tensor

from minidist.comm.collectives import all_gather, all_to_all
from minidist.comm.group import Group
from minidist.comm.wire_bytes import INT8_BLOCK, int8_chunk_bytes


def all_reduce_int8(tensor: Tensor, error: Tensor, group: Group) -> None:
    """Collective: overwrite a floating-point `tensor` (n,) by its approximate sum, which is equal on all ranks.

    error: (n,), this rank's quantization error of the previous call, zeros before the first. It is added to `tensor`
    before the sum, and overwritten by the error of this call: of this rank's own values and, in the chunk that this
    rank sums, of the sum. So the sums of many calls add up to the exact total less the errors of the last call.

    Ranks send int8 values, with one scale for each block of `INT8_BLOCK` consecutive elements. Let m_r be the largest
    magnitude of `tensor + error` in an element's block on rank r, and m that in the sum of the quantized blocks: the
    result differs from the sum of `tensor + error` by at most (sum of m_r over the ranks + m) / 254. A block with a
    non-finite element becomes NaN, and so does its error.
    """
    chunk_blocks = int8_chunk_bytes(tensor.numel(), group.size) // (INT8_BLOCK + 4)
    padded = tensor.new_zeros(group.size * chunk_blocks, INT8_BLOCK)
    torch.add(tensor, error, out=padded.view(-1)[: tensor.numel()])
    sent = _quantize(padded).view(group.size, -1)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group)
    padded -= _dequantize(sent, tensor.dtype)
    own_sum = _dequantize(received, tensor.dtype).view(group.size, -1, INT8_BLOCK).sum(0)
    message = _quantize(own_sum)
    padded.view(group.size, -1, INT8_BLOCK)[group.rank].add_(own_sum).sub_(_dequantize(message, tensor.dtype))
    error.copy_(padded.view(-1)[: tensor.numel()])
    all_gather(received, message.view(1, -1), group)
    tensor.copy_(_dequantize(received, tensor.dtype).view(-1)[: tensor.numel()])


def _quantize(blocks: Tensor) -> Tensor:
    """Return blocks (b, 256) as bytes (b, 260): 256 int8 multiples of the block's scale, then the scale as float32."""
    scale = (blocks.abs().amax(1, keepdim=True) / 127).float()
    numbers = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num().round().clamp(-127, 127)
    return torch.cat([numbers.to(torch.int8).view(torch.uint8), scale.view(torch.uint8)], dim=1)


def _dequantize(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (b, 256), in `dtype`, of blocks that `_quantize` returned."""
    numbers, scale = message.view(-1, INT8_BLOCK + 4).split([INT8_BLOCK, 4], dim=1)
    return numbers.view(torch.int8).to(dtype).mul_(scale.contiguous().view(torch.float32).to(dtype))
