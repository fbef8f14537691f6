"""Recovery from faults: how often to save, finding replicas that differ, and their repair from healthy ones.

Ranks with the same box of a parameter are replicas: what one has lost, the others still have.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minidist.comm import Group, all_gather_object, recv, send
from minidist.errors import RunError, format_ranks
from minidist.parameters import ParamSpec, named_parameters
from minidist.simple.training_state import create_optimizer_states, state_shards

if TYPE_CHECKING:
    from minidist.simple.trainer import Trainer


def expected_time_s(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected time, in seconds, until `interval_s` seconds of work are done and saved, despite failures.

    Failures are a Poisson process, on average every mtbf_s seconds; they also occur in saves and restarts. save_s:
    seconds per save. restart_s: seconds from a failure until work goes on from the last save.
    """
    # Daly 2006, equation 13: M exp(R / M) (exp((tau + D) / M) - 1).
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)


def best_interval_s(mtbf_s: float, save_s: float, restart_s: float = 0.0) -> float:
    """Return the `interval_s`, in seconds, with the least `expected_time_s` per second of work."""
    # The cost has one minimum, between 0 and mtbf_s. A ternary search: it is not beyond the worse one of two points.
    low, high = 0.0, mtbf_s
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        costs = [expected_time_s(at, mtbf_s, save_s, restart_s) / at for at in (left, right)]
        low, high = (low, right) if costs[0] < costs[1] else (left, high)
    return (low + high) / 2


def replicated_tensors(trainer: "Trainer") -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return this rank's parameters, masters and optimizer states by name, each with the ranks that have replicas."""
    engine, found = trainer.engine, {}
    if engine.config.zero.stage < 3:  # stage 3 has no full parameters between steps
        for name, parameter in named_parameters(engine.model).items():
            found[f"params/{name}"] = parameter, engine.parallel.specs[name].replicas
    for name, master in engine.reducer.masters.items():
        replicas = engine.parallel.master_specs[name].replicas
        if master is not found.get(f"params/{name}", (None,))[0]:
            found[f"masters/{name}"] = master, replicas
        for key, value in engine.optimizer.state[master].items():
            found[f"optimizer.{key}/{name}"] = value, replicas
    return found


def tensor_digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bits: the first 8 bytes of their SHA-256."""
    return hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()).digest()[:8]


def differing_replicas(tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], group: Group) -> dict[str, list[int]]:
    """Collective: return which ranks differ from their replicas, and in which tensors: {name: global ranks}.

    tensors: this rank's, by name, each with the global ranks that must have the same bits. If more than half of these
    have equal bits, the others differ; if not, all are named. The result is the same on all ranks of `group`.
    """
    own = {(name, ranks): tensor_digest(tensor) for name, (tensor, ranks) in tensors.items() if len(ranks) > 1}
    digests = dict(zip(group.ranks, all_gather_object(own, group), strict=True))
    found = defaultdict(set)
    for name, ranks in set().union(*digests.values()):
        column = {rank: digests[rank].get((name, ranks)) for rank in ranks}
        [(value, votes)] = Counter(column.values()).most_common(1)
        if votes < len(ranks):
            found[name] |= {rank for rank in ranks if column[rank] != value or 2 * votes <= len(ranks)}
    return {name: sorted(found[name]) for name in sorted(found)}


def describe_state(trainer: "Trainer") -> dict:
    """Return a training state without its tensors: progress, loss scaler, dtypes and shapes."""
    tensors, scaler = {}, trainer.engine.scaler
    for name, (tensor, _) in replicated_tensors(trainer).items():
        tensors[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
    return {"progress": trainer.progress, "scaler": scaler and scaler.state_dict(), "tensors": tensors}


def _all_specs(trainer: "Trainer") -> dict[str, ParamSpec]:
    """Return the specs of this rank's masters, and of all else that it has."""
    parallel = trainer.engine.parallel
    return {**parallel.specs, **parallel.master_specs}


def recover(trainer: "Trainer", source: "Trainer | None") -> list[int]:
    """Collective: give the ranks without a valid training state that of healthy replicas; return these ranks.

    source: the trainer with this rank's state: `trainer` itself; an earlier one of the same layout, if a death led
    to new process groups; None if the state is damaged or lost. A rank behind the newest step also receives. Raises
    RunError on all ranks, and changes nothing, if a shard has no healthy replica, as with ZeRO.
    """
    rank, group, specs = trainer.world.rank, trainer.engine.control, _all_specs(trainer)
    own = {name: spec.replicas for name, spec in specs.items()}, None if source is None else describe_state(source)
    shards, states = zip(*all_gather_object(own, group), strict=True)
    step = max((state["progress"].step for state in states if state), default=0)
    valid = {r: state for r, state in zip(group.ranks, states, strict=True) if state and state["progress"].step == step}
    lost = sorted({pair for of_rank in shards for pair in of_rank.items() if not valid.keys() & pair[1]})
    if lost:
        raise RunError(
            f"{len(lost)} shards have no healthy replica, such as that of {lost[0][0]} on {format_ranks(lost[0][1])}; "
            f"healthy at step {step}: {format_ranks(valid) if valid else 'no rank'}. Go on from the last checkpoint."
        )
    if source is not trainer or rank not in valid:
        state = next(iter(valid.values()))
        trainer.progress = state["progress"]
        if trainer.engine.scaler is not None:
            trainer.engine.scaler.load_state_dict(state["scaler"])
        tensors = {name: entry for each in valid.values() for name, entry in each["tensors"].items()}
        create_optimizer_states(trainer.engine, tensors)
    order = attrgetter("name", "box.start")  # one order on all ranks, so that no two ranks wait for each other
    targets = sorted(state_shards(trainer.engine), key=order)
    values = sorted(state_shards(source.engine), key=order) if rank in valid else targets
    for target, value in zip(targets, values, strict=True):
        name = target.name.partition("/")[2]
        replicas = set(specs[name].replicas if name in specs else group.ranks)
        buffer = value.tensor.to(group.world.control_device)
        data = buffer.view(-1).view(torch.uint8)  # not every backend sends every dtype
        sender = min(replicas & valid.keys())
        for receiver in sorted(replicas - valid.keys()):
            if rank == sender:
                send(data, group.ranks.index(receiver), group)
            elif rank == receiver:
                recv(data, group.ranks.index(sender), group)
        target.tensor.copy_(buffer)
    trainer.engine.reducer.update_parameters()
    return [each for each in group.ranks if each not in valid]
