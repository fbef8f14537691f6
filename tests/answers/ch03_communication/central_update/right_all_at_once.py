"""The root has memory for all gradients and receives them together."""

import torch

from minidist.comm.algorithms.rounds import together


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    others = [rank for rank in range(group.size) if rank != root]
    if group.rank != root:
        together(group, send=[(gradient, root)])
        together(group, recv=[(parameters, root)])
        return
    came = [torch.empty_like(gradient) for _ in others]
    together(group, recv=list(zip(came, others, strict=True)))
    total = torch.stack([gradient, *came])
    how = {"sum": total.sum, "mean": total.mean, "max": total.amax, "min": total.amin, "product": total.prod}[op]
    update(parameters, how(0))
    together(group, send=[(parameters, rank) for rank in others])
