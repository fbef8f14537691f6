"""One rank of `python -m bench local`, under torchrun: times all contenders, in turns.

Arguments: h, the number of rounds, and the folder for `RANK.json`, with each contender's start and end of every round.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from minidist.comm import World, bind
from minidist.config import Config, ConsistencyConfig
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.launch.torchrun import torchrun_world
from minidist.train.engine import Engine

Round = Callable[[int], None]  # takes the number of the first step, and trains h steps
_SEED = 1234


def main() -> None:
    """Time the contenders on this rank and write its file."""
    h, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with torchrun_world("cpu", "gloo") as world, contextlib.ExitStack() as groups:
        steps = h * (rounds + 2)  # the last one, in which all replicas merge, is never reached
        modes = {
            "no communication": ConsistencyConfig(mode="local", h=steps),
            "local SGD": ConsistencyConfig(mode="local", h=h),
            "DiLoCo": ConsistencyConfig(mode="diloco", h=h),
            "DiLoCo, int8": ConsistencyConfig(mode="diloco", h=h, exchange="int8"),
            "synchronous": ConsistencyConfig(),
        }
        contenders = {name: _make_minidist_contender(world, how, steps, h, groups) for name, how in modes.items()}
        contenders["torch local SGD"] = _make_torch_contender(world, steps, h)
        times: dict[str, list] = {name: [] for name in contenders}
        for number in range(rounds + 1):  # the first one is not timed
            for name, train_round in contenders.items():
                dist.barrier()
                start_s = time.monotonic()
                train_round(number * h)
                end_s = time.monotonic()
                if number:
                    times[name].append((start_s, end_s))
        Path(folder, f"{world.rank}.json").write_text(json.dumps(times))


def _make_loader(config: Config) -> Loader:
    """Return the loader of the synthetic text that all contenders train on."""
    return Loader(generate_text(200_000, _SEED), config.data.seq_len, _SEED)


def _make_minidist_contender(
    world: World, how: ConsistencyConfig, steps: int, h: int, groups_of_all: contextlib.ExitStack
) -> Round:
    """Return a function that trains minidist for one round of h steps.

    how: the synchronization mode. steps: of the whole run. groups_of_all: destroys the process groups at the end.
    """
    config = Config(consistency=how)
    config = replace(config, train=replace(config.train, steps=steps, seed=_SEED))
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config))
    groups_of_all.callback(groups.destroy)
    model = Transformer(config.model)
    init_parameters(model, _SEED)
    engine, loader = Engine(parallelize(model, groups, config), groups, config.optim, _SEED), _make_loader(config)
    batch = config.train.global_batch

    def train_round(first: int) -> None:
        for step in range(first, first + h):
            batches = loader.micro_batches(step * batch, batch, world.rank, world.size, config.train.micro_batches)
            engine.step(step, batches, config.optim.lr)

    return train_round


def _make_torch_contender(world: World, steps: int, h: int) -> Round:
    """Return a function that trains one round of h steps in a plain loop, with torch's averaging of parameters.

    Model, data and optimizer are those of minidist. steps: of the whole run.
    """
    config = Config()
    model = Transformer(config.model)
    init_parameters(model, _SEED)
    optimizer = torch.optim.AdamW(model.parameters(), config.optim.lr, config.optim.betas)
    averager, loader = PeriodicModelAverager(period=h, warmup_steps=h - 1), _make_loader(config)
    batch = config.train.global_batch

    def train_round(first: int) -> None:
        for step in range(first, first + h):
            for part in loader.micro_batches(step * batch, batch, world.rank, world.size, config.train.micro_batches):
                loss, count = model(part.tokens, part.labels)
                (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
            optimizer.step()
            averager.average_parameters(model.parameters())  # those that have a gradient
            optimizer.zero_grad()

    return train_round


if __name__ == "__main__":
    main()
