"""The training state as shards of global tensors, for checkpoints."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from minidist.checkpoint.shards import SavedTensor, TensorShard, make_tensor_shards
from minidist.errors import DamagedError
from minidist.parameters import Box
from minidist.train.engine import Engine
from minidist.train.optimizer import optimizer_state_names

PARAMETERS = "params"
OPTIMIZER = "optimizer."
_TOKENS = "merge/tokens"
_QUANTIZATION_ERROR = "quantization_error"


def _prefix(engine: Engine) -> str:
    """Return the prefix in the names of the tensors of which each separately trained replica has its own."""
    return _replica_prefix(engine.merger.replica) if engine.merger else ""


def _replica_prefix(replica: int) -> str:
    """Return "" for replica 0, "replica-1." for replica 1, and so on."""
    return f"replica-{replica}." if replica else ""


_OF_EACH_REPLICA = (PARAMETERS, OPTIMIZER, _TOKENS, _QUANTIZATION_ERROR)


def renumber_replica(shards: Iterable[TensorShard], before: int, now: int) -> Iterator[TensorShard]:
    """Yield the shards of replica number `before` with the names that replica `now` has; no copies.

    The names of tensors that all replicas share stay.
    """
    for shard in shards:
        name = shard.name.removeprefix(_replica_prefix(before))
        is_own = name.startswith(_OF_EACH_REPLICA)
        yield dataclasses.replace(shard, name=_replica_prefix(now) + name) if is_own else shard


def copy_first_replica(shards: Iterable[TensorShard], replicas: Iterable[int]) -> Iterator[TensorShard]:
    """Yield replica 0's own shards once for each of `replicas`, under that replica's names; the tensors are shared."""
    for shard in shards:
        if shard.name.startswith(_OF_EACH_REPLICA):
            yield from (dataclasses.replace(shard, name=_replica_prefix(replica) + shard.name) for replica in replicas)


def checkpoint_shards(engine: Engine) -> Iterator[TensorShard]:
    """Yield this rank's `TensorShard`s of parameters, buffers, optimizer states and the replica merger's states."""
    rank = engine.groups.world.rank
    reducer = engine.reducer
    prefix = _prefix(engine)
    tensors = reducer.checkpoint_tensors()
    for name, parameter in engine.parameters.items():
        if name in reducer.master_specs:
            yield from make_tensor_shards(prefix + PARAMETERS, reducer.master_specs[name], tensors[name], rank)
        elif not parameter.requires_grad and parameter.untyped_storage().nbytes():  # frozen, and not sharded
            yield from make_tensor_shards(prefix + PARAMETERS, engine.specs[name], parameter.detach(), rank)
    for name, master in reducer.masters.items():
        spec = reducer.master_specs[name]
        for key, value in engine.optimizer.state.get(master, {}).items():
            if value is None:
                continue
            if value.dim():
                yield from make_tensor_shards(prefix + OPTIMIZER + key, spec, value, rank)
            else:  # a scalar, as AdamW's step count
                # The same on all shards of a parameter: written with the first box.
                first = not any(start for box in spec.boxes[:1] for start in box.start)
                is_saved_here = first and spec.owner == rank
                yield TensorShard(f"{prefix}{OPTIMIZER}{key}/{name}", (), Box((), ()), value, is_saved_here)
    holders = engine.groups.mesh.ranks(("dp", "cp", "tp"), rank)  # buffers are replicated within a stage
    for name, buffer in engine.model.named_buffers():
        shape = tuple(buffer.shape)
        yield TensorShard(f"buffers/{name}", shape, Box.whole(shape), buffer, is_saved_here=rank == holders[0])
    if engine.merger is not None:
        for kind, name, tensor in engine.merger.outer_states():
            for shard in make_tensor_shards(kind, reducer.master_specs[name], tensor, rank):
                yield dataclasses.replace(shard, is_saved_here=shard.is_saved_here and not prefix)
        for name, error in engine.merger.quantization_errors():
            yield from make_tensor_shards(prefix + _QUANTIZATION_ERROR, reducer.master_specs[name], error, rank)
        first = engine.control.rank == 0
        tokens = engine.merger.tokens
        yield TensorShard(prefix + _TOKENS, tokens.shape, Box.whole(tuple(tokens.shape)), tokens, first)


def create_optimizer_states(engine: Engine, tensors: Mapping[str, SavedTensor]) -> None:
    """Create the optimizer states that a checkpoint contains, as zeros, so that they can be loaded in place.

    engine: its optimizer gets the states, which it would otherwise create in its first step. tensors: the checkpoint's
    tensors, by name. A parameter that was never used has no state in the checkpoint, and gets none. Raises DamagedError
    if a parameter has only some of the states that its optimizer keeps.
    """
    engine.optimizer.state.clear()  # of a checkpoint that turned out to be damaged
    prefix = _prefix(engine) + OPTIMIZER
    for name, master in engine.reducer.masters.items():
        names = optimizer_state_names(engine.optim.kind, name, len(engine.reducer.master_specs[name].shape))
        found = {key: tensors[f"{prefix}{key}/{name}"] for key in names if f"{prefix}{key}/{name}" in tensors}
        if found and len(found) < len(names):
            missing = ", ".join(key for key in names if key not in found)
            raise DamagedError(f"it has states of the optimizer for {name}, but not {missing}")
        for key, tensor in found.items():
            scalar = not tensor.shape and key == "step"  # torch's step count is a float32, whatever the master is
            made = torch.zeros((), device=master.device) if scalar else torch.zeros_like(master)
            engine.optimizer.state[master][key] = made


def find_first_non_finite(engine: Engine) -> list[str]:
    """Return [name] of the first non-finite tensor among this rank's checkpoint shards; [] if all are finite.

    Reads all tensors once and waits for the GPU once: the largest magnitude of a tensor with NaN is NaN.
    """
    shards = [shard for shard in checkpoint_shards(engine) if shard.tensor.is_floating_point() and shard.box.numel]
    largest = [shard.tensor.detach().norm(math.inf).double() for shard in shards]
    values = torch.stack([value.to(engine.groups.world.device) for value in largest]).tolist() if largest else []
    return [shard.name for shard, value in zip(shards, values, strict=True) if not math.isfinite(value)][:1]
