"""Compare the estimate with a real step: every rank's bytes of model states and bytes sent."""

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

DEFAULT_SWITCHES = {name: values[0] for name, values in SWITCHES.items()}
COMPARED_FIELDS = (
    "samples",
    "local_parameters",
    "parameter_bytes",
    "gradient_bytes",
    "master_bytes",
    "optimizer_bytes",
    "wire_bytes",
)


def make_config(layout: Layout, world: int, micro_batches: int = 4, **more) -> Config:
    """A small model, buckets of 4 kB, and a batch of 29 samples, which no number of ranks divides."""
    values = DEFAULT_SWITCHES | {"micro_batches": micro_batches, "gradients": "bucketed"}
    values |= {name: more.pop(name) for name in list(more) if name in SWITCHES}
    config = Case(world, max(2, layout.pp * layout.chunks_per_stage), layout, **values).config()
    parts = {name: dataclasses.replace(getattr(config, name), **changed) for name, changed in more.items()}
    return dataclasses.replace(config, **parts)


def measure_steps(world: World, configs: list[Config]) -> list[dict]:
    """Run one step of each configuration; return this rank's `COMPARED_FIELDS` as measured."""
    results = []
    for config in configs:
        mesh = config.mesh_of(world.size)
        groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
        engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
        loader, dp_rank = Loader(generate_text(2000), config.data.seq_len, seed=1), mesh.coords(world.rank)["dp"]
        train, shares = config.train, config.data.shares
        batches = loader.micro_batches(0, train.global_batch, dp_rank, mesh.dp, train.micro_batches, shares)
        groups.meter.wire_bytes.clear()  # of the initial broadcast
        measured = {}
        engine.step(
            0,
            batches,
            lr=0.1,
            on_gradients_reduced=lambda engine=engine, measured=measured: measured.update(model_state_bytes(engine)),
        )
        states = [
            tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor is not None
        ]
        sent = {use: count for use, count in groups.meter.wire_bytes.items() if count}
        measured |= {
            "optimizer_bytes": tensor_bytes(states),
            "wire_bytes": sent,
            "samples": sum(len(b.samples) for b in batches),
        }
        results.append(measured)
        groups.destroy()
    return results


def model_state_bytes(engine: Engine) -> dict:
    """Bytes of parameters, gradients and master weights at the end of backward."""
    parameters, members = list(engine.parameters.values()), getattr(engine.reducer, "members", [])
    if members:
        gradients = [member.gradients.result for member in members]
        tensors_with_memory = [*parameters, *(member.flat_param.shard for member in members)]
    else:
        gradients, tensors_with_memory = [parameter.grad for parameter in parameters], parameters
    return {
        "local_parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": storage_bytes(tensors_with_memory),
        "gradient_bytes": storage_bytes(gradients),
        "master_bytes": storage_bytes(
            member.flat_param.masters.tensor for member in members if member.flat_param.masters.separate
        ),
    }


def storage_bytes(tensors) -> int:
    """Bytes of the tensors' storages, each storage counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensor_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def assert_estimate_is_measured(ranks, world: int, configs: list[Config]) -> None:
    by_rank = ranks(measure_steps, world, configs)
    for number, config in enumerate(configs):
        for cost in estimate(config, world).ranks:
            estimated = {name: getattr(cost, name) for name in COMPARED_FIELDS}
            estimated["wire_bytes"] = {use: count for use, count in estimated["wire_bytes"].items() if count}
            assert estimated == by_rank[cost.rank][number], (cost.coords, config.parallel, config.comm)
