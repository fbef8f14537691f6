"""Element-wise reductions, always in rank order."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_PAIRWISE: dict[dist.ReduceOp.RedOpType, tuple[str, Callable]] = {
    dist.ReduceOp.SUM: ("sum", torch.add),
    dist.ReduceOp.AVG: ("avg", torch.add),
    dist.ReduceOp.PRODUCT: ("product", torch.mul),
    dist.ReduceOp.MIN: ("min", torch.minimum),
    dist.ReduceOp.MAX: ("max", torch.maximum),
    dist.ReduceOp.BAND: ("band", torch.bitwise_and),
    dist.ReduceOp.BOR: ("bor", torch.bitwise_or),
    dist.ReduceOp.BXOR: ("bxor", torch.bitwise_xor),
}


class Reduction:
    """An element-wise reduction of tensors, made from a `dist.ReduceOp`.

    Raises ValueError for PREMUL_SUM, which needs a factor. name: "sum", "avg", "product", "min", "max", "band", ...
    """

    def __init__(self, op: dist.ReduceOp):
        kind = getattr(op, "op", op)  # torch passes either
        if kind not in _PAIRWISE:
            possible = ", ".join(name for name, _ in _PAIRWISE.values())
            raise ValueError(f"the backend shm cannot reduce by {kind}; possible are {possible}")
        self.name, self._combine = _PAIRWISE[kind]

    def reduce_into(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce `parts`, one tensor of equal shape per rank, element-wise and in rank order; write to `out`.

        out: may be the same memory as parts[0] or parts[1], but not as a later part.
        """
        if len(parts) == 1:
            if out.data_ptr() != parts[0].data_ptr():
                out.copy_(parts[0])
        else:
            self._combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self._combine(out, part, out=out)
        if self.name == "avg":
            out.div_(len(parts))
