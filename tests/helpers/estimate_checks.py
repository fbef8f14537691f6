"""The estimate compared with a real step: model states and bytes sent of every rank."""

import dataclasses

from minidist.comm import Meter, World, bind
from minidist.config import Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.estimate.estimate import estimate
from minidist.tools.parity.cases import SWITCHES, Case
from minidist.tools.parity.layouts import Layout
from minidist.train.engine import Engine

PLAIN = {name: values[0] for name, values in SWITCHES.items()}
MEASURED = (
    "samples",
    "local_parameters",
    "parameter_bytes",
    "gradient_bytes",
    "master_bytes",
    "optimizer_bytes",
    "wire_bytes",
)


def configured(layout: Layout, world: int, micro_batches: int = 4, **more) -> Config:
    """A small model, buckets of 4 kB, and a batch of 29 samples, which no number of ranks divides."""
    values = PLAIN | {"micro_batches": micro_batches, "gradients": "bucketed"}
    values |= {name: more.pop(name) for name in list(more) if name in SWITCHES}
    config = Case(world, max(2, layout.pp * layout.chunks), layout, **values).config()
    parts = {name: dataclasses.replace(getattr(config, name), **changed) for name, changed in more.items()}
    return dataclasses.replace(config, **parts)


def measured(world: World, configs: list[Config]) -> list[dict]:
    """What this rank has and has sent after one step of each: what the estimate says under the same names."""
    found = []
    for config in configs:
        mesh = config.mesh_of(world.size)
        groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
        engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
        loader, at = Loader(generate_text(2000), config.data.seq_len, seed=1), mesh.coords(world.rank)["dp"]
        train, shares = config.train, config.data.shares
        batches = loader.micro_batches(0, train.global_batch, at, mesh.dp, train.micro_batches, shares)
        groups.meter.wire_bytes.clear()  # of the start
        seen = {}
        engine.step(0, batches, lr=0.1, inspect=lambda engine=engine, seen=seen: seen.update(held(engine)))
        states = [
            tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor is not None
        ]
        sent = {use: count for use, count in groups.meter.wire_bytes.items() if count}
        seen |= {"optimizer_bytes": size(states), "wire_bytes": sent, "samples": sum(len(b.samples) for b in batches)}
        found.append(seen)
        groups.destroy()
    return found


def held(engine: Engine) -> dict:
    """The memory behind parameters, gradients and masters when backward is over."""
    parameters, members = list(engine.parameters.values()), getattr(engine.reducer, "members", [])
    if members:
        gradients = [member.gradients.result for member in members]
        behind = [*parameters, *(member.flat_param.part for member in members)]
    else:
        gradients, behind = [parameter.grad for parameter in parameters], parameters
    return {
        "local_parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": storages(behind),
        "gradient_bytes": storages(gradients),
        "master_bytes": storages(
            member.flat_param.masters.tensor for member in members if member.flat_param.masters.separate
        ),
    }


def storages(tensors) -> int:
    """Bytes of the memory behind tensors, each piece counted once."""
    behind = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in behind}.values())


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def answers_agree(ranks, world: int, configs: list[Config]) -> None:
    by_rank = ranks(measured, world, configs)
    for number, config in enumerate(configs):
        for cost in estimate(config, world).ranks:
            told = {name: getattr(cost, name) for name in MEASURED}
            told["wire_bytes"] = {use: count for use, count in told["wire_bytes"].items() if count}
            assert told == by_rank[cost.rank][number], (cost.coords, config.parallel, config.comm)
