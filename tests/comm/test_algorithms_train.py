"""`--comm.algorithm`: gradients reduced by the package's algorithms match the backend's, in any order of waits."""

import json
from typing import get_args, get_type_hints

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.algorithms import ALGORITHMS
from minidist.config import CommConfig, Config
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parallelize import DEFAULT_GROUP_SPECS, parallelize, with_all_reduce_algorithm
from minidist.tools.network.algorithm_bytes import sent_elements_by_algorithm
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import small_config, train_small, write_text


def read_losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("gradients", ["bucketed", *exhaustive("naive")])
def test_losses_with_every_algorithm_match_the_backends(ranks, tmp_path, text, gradients):
    for name in ("backend", *ALGORITHMS["all_reduce"]):
        ranks(train_small, 3, small_config(tmp_path / name, text, comm__algorithm=name, comm__gradients=gradients))
    expected = read_losses(tmp_path / "backend")
    assert len(expected) == 6
    for algorithm in ALGORITHMS["all_reduce"]:
        # Another order of addition of float32, carried through six steps of SGD: as in test_trainer.
        assert read_losses(tmp_path / algorithm) == pytest.approx(expected, rel=1e-5), algorithm


def gradient_traffic(world: World, algorithm: str) -> tuple:
    """The gradient traffic of a step: names of the operations, bytes sent by this rank, sizes of the buckets."""
    model = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=1)
    config = Config(model=model, comm=CommConfig(algorithm=algorithm))
    groups = bind(world, Mesh(dp=world.size), DEFAULT_GROUP_SPECS, meter=Meter())
    parallel = parallelize(Transformer(config.model), groups, config)
    groups.meter.records.clear()
    for name in parallel.specs:
        parallel.reducer.mark_ready(name)
    parallel.reducer.finish_reductions()
    sent = [record for record in groups.meter.records if record.group_name == "grads"]
    buckets = [bucket.buffer.numel() for bucket in parallel.reducer._buckets]
    return {record.name for record in sent}, sum(record.wire_bytes for record in sent), buckets


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_gradient_traffic_matches_the_chosen_algorithm(ranks, algorithm):
    for rank, (names, sent, buckets) in enumerate(ranks(gradient_traffic, 3, algorithm)):
        assert names == {"send", "recv"}
        assert sent == 4 * sum(sent_elements_by_algorithm("all_reduce", algorithm, n, 3, rank) for n in buckets)


def test_every_all_reduce_algorithm_is_a_choice_of_the_option():
    choices = get_args(get_type_hints(CommConfig)["algorithm"])
    assert choices == ("backend", *ALGORITHMS["all_reduce"])


def wait_in_order(world: World, algorithm: str, order: list[int]) -> list:
    """Launch three all-reduces and wait in `order`; return the sums and the bytes sent before and after the waits."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))], meter=Meter())["grads"]
    group, meter = with_all_reduce_algorithm(algorithm, group), group.meter
    tensors = [torch.full((n,), float(world.rank + 10 * n)) for n in (3, 4, 5)]
    handles = [comm.all_reduce(tensor, group, async_op=True) for tensor in tensors]
    sent = [meter.total_wire_bytes]
    # Ranks may wait in different orders: operations run in the order of launch.
    for i in order if world.rank else reversed(order):
        handles[i].wait(host=True)
        handles[i].wait()
    sent.append(meter.total_wire_bytes)
    last = torch.ones(1)
    comm.all_reduce(last, group, "max")
    return [tensor.tolist() for tensor in tensors], sent, {record.name for record in meter.records}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_operations_run_when_waited_for_in_the_order_of_launch(ranks, order):
    size = 3
    for rank, (sums, (at_launch, after), names) in enumerate(ranks(wait_in_order, size, "ring", order)):
        assert sums == [[3.0 + 30 * n] * n for n in (3, 4, 5)]
        assert at_launch == 0
        assert after == 4 * sum(sent_elements_by_algorithm("all_reduce", "ring", n, size, rank) for n in (3, 4, 5))
        assert names == {"send", "recv"}


def test_algorithm_backend_uses_the_groups_all_reduce(ranks):
    for _, (at_launch, _), names in ranks(wait_in_order, 2, "backend", [0, 1, 2]):
        assert at_launch > 0 and names == {"all_reduce"}


def all_reduce_alone(world: World) -> list:
    group = with_all_reduce_algorithm("tree", bind(world, Mesh())["control"])
    tensor = torch.ones(2)
    comm.all_reduce(tensor, group, async_op=True).wait()
    return tensor.tolist()


def test_an_algorithm_on_one_rank_sends_nothing():
    assert all_reduce_alone(World.single()) == [1.0, 1.0]
