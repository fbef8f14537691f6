"""Recovery from faults: how often to save, finding replicas that differ, and their repair from healthy ones."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minidist.comm import Group, all_gather_object, recv, send
from minidist.errors import RunError, format_ranks
from minidist.parameters import named_parameters
from minidist.simple.training_state import create_optimizer_states, json_state, load_json_state, state_shards

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
    engine = trainer.engine
    found = {}
    if engine.config.zero.stage < 3:  # stage 3 has no full parameters between steps
        for name, parameter in named_parameters(engine.model).items():
            found[f"params/{name}"] = parameter, engine.parallel.specs[name].replicas
    for name, master in engine.reducer.masters.items():
        replicas = engine.parallel.master_specs[name].replicas
        parameter, _ = found.get(f"params/{name}", (None, ()))
        if master is not parameter:
            found[f"masters/{name}"] = master, replicas
        for key, value in engine.optimizer.state[master].items():
            found[f"optimizer.{key}/{name}"] = value, replicas
    return found


def tensor_digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bits: the first 8 bytes of their SHA-256."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)  # even of one strided element
    return hashlib.sha256(flat.view(torch.uint8).numpy()).digest()[:8]


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
        [(value, votes)] = Counter(digest for digest in column.values() if digest).most_common(1)
        if votes < len(ranks):
            found[name] |= {rank for rank in ranks if column[rank] != value or 2 * votes <= len(ranks)}
    return {name: sorted(found[name]) for name in sorted(found)}


def collect_state_metadata(trainer: "Trainer") -> dict:
    """Return the JSON state and the shapes of all tensors, without values: {"json", "tensors": {name: {"shape"}}}."""
    tensors = {name: {"shape": tuple(tensor.shape)} for name, (tensor, _) in replicated_tensors(trainer).items()}
    return {"json": json_state(trainer), "tensors": tensors}


def shard_replicas(trainer: "Trainer") -> dict[str, tuple[int, ...]]:
    """Return by name the global ranks with this rank's shard of a parameter and its optimizer states, or a buffer."""
    parallel = trainer.engine.parallel
    return {name: spec.replicas for name, spec in {**parallel.specs, **parallel.master_specs}.items()}


def require_replicas(trainer: "Trainer", healthy: Collection[int]) -> None:
    """Collective: raise RunError on all ranks if a shard of any rank has no replica on the ranks `healthy`."""
    by_rank = all_gather_object(shard_replicas(trainer), trainer.engine.control)
    shards = set().union(*(own.items() for own in by_rank))
    lost = sorted((name, ranks) for name, ranks in shards if not set(healthy) & set(ranks))
    if lost:
        raise RunError(
            f"{len(lost)} shards have no healthy replica, such as that of {lost[0][0]} on {format_ranks(lost[0][1])}; "
            f"healthy: {format_ranks(healthy) if healthy else 'no rank'}. Go on from the last checkpoint."
        )


def recover(trainer: "Trainer", source: "Trainer | None") -> list[int]:
    """Collective: send the state of healthy replicas to the ranks that have no valid one; return the ranks that got it.

    source: the trainer with this rank's state: `trainer` itself; an earlier one with the same shards, if a death led
    to new process groups; None if the state is damaged or lost. A rank behind the newest step also receives. Raises
    RunError on all ranks, and changes nothing, if a shard has no healthy replica, as with ZeRO.
    """
    rank, group = trainer.world.rank, trainer.engine.control
    states = all_gather_object(None if source is None else collect_state_metadata(source), group)
    newest = max((state["json"]["step"] for state in states if state), default=0)
    healthy = {r: s for r, s in zip(group.ranks, states, strict=True) if s and s["json"]["step"] == newest}
    require_replicas(trainer, healthy)
    if source is not trainer or rank not in healthy:
        load_json_state(trainer, next(iter(healthy.values()))["json"])
        tensors = {name: entry for state in healthy.values() for name, entry in state["tensors"].items()}
        create_optimizer_states(trainer.engine, tensors)
    # One order on all ranks, so that no two ranks wait for each other.
    owners = trainer, source if rank in healthy else trainer
    targets, values = (sorted(state_shards(each.engine), key=lambda s: (s.name, s.box.start)) for each in owners)
    replicas_of = shard_replicas(trainer)
    for target, value in zip(targets, values, strict=True):
        replicas = set(replicas_of.get(target.name.partition("/")[2], group.ranks))
        buffer = value.tensor.to(group.world.control_device)
        data = buffer.view(-1).view(torch.uint8)  # not every backend sends every dtype
        sender = min(replicas & healthy.keys())
        for receiver in sorted(replicas - healthy.keys()):
            if rank == sender:
                send(data, group.ranks.index(receiver), group)
            elif rank == receiver:
                recv(data, group.ranks.index(sender), group)
        target.tensor.copy_(buffer)
    trainer.engine.reducer.update_parameters()
    return [each for each in group.ranks if each not in healthy]
