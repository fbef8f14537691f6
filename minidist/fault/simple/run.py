"""A run, and everything that decides its next step, so that a resumed run is the same run (7.3).

Restrictions: data parallelism only, and no scheduler beyond a learning rate per step. The fast version is
`minidist.train.resume`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.checkpoint.shards import DTYPES, TensorShard
from minidist.comm import Group, all_gather_object, bind_all_gather_object
from minidist.fault.collective_errors import ErrorOnAnyRank, run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.fault.simple.checkpoint import complete_checkpoints, load, read_index
from minidist.hashing import hash64
from minidist.parameters import Box


@dataclass
class Run:
    """A training run on one rank: its configuration, and from `step` on the state that changes.

    model: this rank's replica. optimizer: updates the model's parameters. sample_loss: maps a sample's number to its
    loss, a scalar tensor. num_samples: in the data set. batch_size: samples per step, of all ranks together.
    learning_rate: maps a step's number, from 0, to its rate. seed: for the data order and dropout. scaler: has `scale`,
    `update(overflow)`, `state_dict()` and `load_state_dict(state)`, as `LossScaler`; None without loss scaling. step:
    number of completed steps. position: number of samples consumed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sample_loss: Callable[[int], Tensor]
    num_samples: int
    batch_size: int
    learning_rate: Callable[[int], float]
    seed: int = 0
    scaler: Any = None
    step: int = 0
    position: int = 0


def run_shards(run: Run, is_saved_here: bool) -> list[TensorShard]:
    """Return all tensors of a run, unsharded, as `TensorShard`s: parameters, buffers and optimizer states.

    The buffers include non-persistent ones, which `state_dict` leaves out: the next step may depend on them. The names
    of the tensors are `params/NAME`, `buffers/NAME` and `optimizer.KEY/NAME`, as `optimizer.exp_avg/layer.weight`.
    is_saved_here: whether this rank saves them.
    """
    tensors = {f"params/{name}": parameter for name, parameter in run.model.named_parameters()}
    tensors |= {f"buffers/{name}": buffer for name, buffer in run.model.named_buffers()}
    for name, parameter in run.model.named_parameters():
        states = run.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{key}/{name}": value for key, value in states.items()}
    return [TensorShard(n, t.shape, Box.whole(tuple(t.shape)), t, is_saved_here) for n, t in tensors.items()]


def run_state(run: Run) -> dict:
    """Return a run's state outside of its tensors, as a JSON object: step, position, seed and loss scale."""
    scaler = None if run.scaler is None else run.scaler.state_dict()
    return {"step": run.step, "position": run.position, "seed": run.seed, "scaler": scaler}


def set_run_state(run: Run, state: dict) -> None:
    """Set a run's step, position, seed and loss scale to those that `run_state` returned."""
    run.step, run.position, run.seed = state["step"], state["position"], state["seed"]
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])


def create_optimizer_states(run: Run, tensors: Mapping[str, tuple[Sequence[int], str]]) -> None:
    """Replace the optimizer states of a run with new ones, all zeros, so that a checkpoint can be loaded into them.

    tensors: the (shape, dtype name) of each tensor of the checkpoint, by its name as in `run_shards`. Entries that are
    not optimizer states (parameters and buffers) are ignored.
    """
    parameters = dict(run.model.named_parameters())
    run.optimizer.state.clear()
    for stored, (shape, dtype) in tensors.items():
        kind, name = stored.split("/", 1)
        if kind.startswith("optimizer."):
            key = kind.removeprefix("optimizer.")
            run.optimizer.state[parameters[name]][key] = torch.zeros(shape, dtype=DTYPES[dtype])


def resume(run: Run, disk: Disk, group: Group) -> bool:
    """Collective: load the newest intact checkpoint into the run; return whether there was one.

    Parameters, buffers, optimizer states, step, position, seed and loss scale all become those of the checkpoint. A
    damaged checkpoint is renamed to `.damaged`, and the one before it is tried.
    """
    for folder in reversed(all_gather_object(complete_checkpoints(disk), group)[0]):
        try:
            [index, *_] = run_on_all_ranks(bind_all_gather_object(group), lambda at=folder: read_index(disk, at))
            create_optimizer_states(run, {name: (t["shape"], t["dtype"]) for name, t in index["tensors"].items()})
            set_run_state(run, load(disk, folder, run_shards(run, False), group))
            return True
        except ErrorOnAnyRank as failure:
            run.optimizer.state.clear()
            if not failure.found_damage:
                raise
            warnings.warn(f"{folder} is not used: {failure}", stacklevel=2)
            if group.rank == 0:
                disk.rename(folder, f"{folder}.damaged")
    return False


def samples_at(seed: int, position: int, count: int, num_samples: int) -> list[int]:
    """Return the numbers of the next `count` samples of a run at `position`; each epoch is a new permutation."""
    epochs = range(position // num_samples, (position + count - 1) // num_samples + 1)
    seeds = [int(hash64(seed, epoch)) >> 1 for epoch in epochs]
    order = torch.cat([torch.randperm(num_samples, generator=torch.Generator().manual_seed(s)) for s in seeds])
    start = position - epochs[0] * num_samples
    return order[start : start + count].tolist()
