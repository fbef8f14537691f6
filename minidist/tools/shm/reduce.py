"""Element-wise reductions, always in rank order."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TWO: dict[dist.ReduceOp.RedOpType, tuple[str, Callable]] = {
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
    """One of torch's `ReduceOp`s. Raises ValueError for those that need an argument of their own (PREMUL_SUM)."""

    def __init__(self, op: dist.ReduceOp):
        kind = getattr(op, "op", op)  # torch passes either
        if kind not in _TWO:
            possible = ", ".join(name for name, _ in _TWO.values())
            raise ValueError(f"the backend shm cannot reduce by {kind}; possible are {possible}")
        self.name, self._two = _TWO[kind]

    def reduce(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce `parts` from left to right into `out`, which may be parts[0] or parts[1] but no other part."""
        if len(parts) == 1:
            if out.data_ptr() != parts[0].data_ptr():
                out.copy_(parts[0])
        else:
            self._two(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self._two(out, part, out=out)
        if self.name == "avg":
            out.div_(len(parts))
