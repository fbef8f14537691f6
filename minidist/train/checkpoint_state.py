"""The training state as pieces of global tensors, which is how a checkpoint holds it."""

from collections.abc import Iterator

import torch

from minidist.fault.index import Index
from minidist.fault.shards import DTYPES, TensorShard, tensor_shards
from minidist.parameters import Box
from minidist.train.engine import Engine

PARAMETERS = "params"
_OPTIMIZER = "optimizer."


def pieces(engine: Engine) -> Iterator[TensorShard]:
    """Everything a resumed run needs besides its position: parameters, buffers and the optimizer's state."""
    rank, reducer = engine.groups.world.rank, engine.reducer
    tensors = reducer.checkpoint_tensors()
    for name, parameter in engine.parameters.items():
        if name in reducer.master_specs:
            yield from tensor_shards(PARAMETERS, reducer.master_specs[name], tensors[name], rank)
        elif not parameter.requires_grad and parameter.numel() and reducer.gatherer is None:  # frozen and replicated
            yield from tensor_shards(PARAMETERS, engine.specs[name], parameter.detach(), rank)
    for name, master in reducer.masters.items():
        spec = reducer.master_specs[name]
        for key, value in engine.optimizer.state.get(master, {}).items():
            if value is None:
                continue
            if value.dim():
                yield from tensor_shards(_OPTIMIZER + key, spec, value, rank)
            else:  # AdamW counts its steps for every parameter
                # It is the same for all boxes of a parameter: who writes the first box writes it.
                first = not any(start for box in spec.boxes[:1] for start in box.start)
                writes = first and spec.owner == rank
                yield TensorShard(f"{_OPTIMIZER}{key}/{name}", (), Box((), ()), value, writes)
    holders = engine.groups.mesh.ranks(("dp", "cp", "tp"), rank)  # a buffer is on one stage, and whole
    for name, buffer in engine.model.named_buffers():
        shape = tuple(buffer.shape)
        yield TensorShard(f"buffers/{name}", shape, Box.whole(shape), buffer, writes=rank == holders[0])


def prepare(engine: Engine, index: Index) -> None:
    """Make the optimizer state that the checkpoint has and a fresh optimizer makes only in its first step.

    A parameter that no step has used has no state, there as here.
    """
    for stored, tensor in index.tensors.items():
        kind, name = stored.split("/", 1)
        if kind.startswith(_OPTIMIZER) and name in engine.reducer.masters:
            master = engine.reducer.masters[name]
            like = {"dtype": DTYPES[tensor.dtype], "device": master.device}
            made = torch.zeros(master.shape, **like) if tensor.shape else torch.zeros((), **like)
            engine.optimizer.state[master][kind.removeprefix(_OPTIMIZER)] = made
