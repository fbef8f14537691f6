"""The training state of an engine as shards of named global tensors, which is what a checkpoint contains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from minidist.parameters import Box
from minidist.simple.checkpoint import Shard, make_shards
from minidist.simple.engine import Engine
from minidist.simple.parallelize import named_tensors


def state_shards(engine: Engine) -> list[Shard]:
    """Return this rank's shards of masters, optimizer states, frozen parameters, buffers, and what a merge needs."""
    rank, merger, specs = engine.groups.world.rank, engine.merger, engine.parallel.master_specs
    prefix = replica_prefix(engine)
    shards: list[Shard] = []
    shared: list[Shard] = []  # the same in all replicas, so that the first one saves them
    for name, master in engine.reducer.masters.items():
        shards += make_shards(f"{prefix}params", specs[name], master, rank)
        for key, value in engine.optimizer.state[master].items():
            if value.dim():
                shards += make_shards(f"{prefix}optimizer.{key}", specs[name], value, rank)
            else:  # AdamW's number of steps: saved by the rank with the parameter's first element
                is_saved_here = specs[name].owner == rank and not any(specs[name].boxes[0].start)
                shards.append(Shard(f"{prefix}optimizer.{key}/{name}", (), Box((), ()), value, is_saved_here))
    for name, tensor in named_tensors(engine.model).items():
        if not tensor.requires_grad:
            kind = "params" if isinstance(tensor, nn.Parameter) else "buffers"
            shared += make_shards(kind, engine.parallel.specs[name], tensor, rank)
    if merger is not None:
        tokens = merger.num_tokens
        shards.append(Shard(f"{prefix}merge/tokens", (1,), Box.whole((1,)), tokens, engine.control.rank == 0))
        for kind, states in merger.outer_states().items():
            for name, state in states.items():
                shared += make_shards(kind, specs[name], state, rank)
    return shards + [replace(shard, is_saved_here=shard.is_saved_here and not prefix) for shard in shared]


def replica_prefix(engine: Engine) -> str:
    """Return what the names of a replica's own tensors begin with: "" of the first, then "replica-1." and so on."""
    replica = 0 if engine.merger is None else engine.merger.group.rank
    return f"replica-{replica}." if replica else ""


def create_optimizer_states(engine: Engine, tensors: Mapping[str, Any]) -> None:
    """Create the optimizer states that a checkpoint has, as zeros; the optimizer would create them in its first step.

    tensors: the checkpoint's, by name, as in its index.
    """
    engine.optimizer.state.clear()
    prefix = f"{replica_prefix(engine)}optimizer."
    for stored, entry in tensors.items():
        kind, _, name = stored.partition("/")
        if kind.startswith(prefix) and name in engine.reducer.masters:
            master = engine.reducer.masters[name]
            value = torch.zeros_like(master) if entry["shape"] else torch.zeros((), device=master.device)
            engine.optimizer.state[master][kind.removeprefix(prefix)] = value
