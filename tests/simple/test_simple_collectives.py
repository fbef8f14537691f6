"""The simple collectives give what torch computes in one process, send what they must, and reduce a run's gradients."""

import sys

import pytest
import torch

from minidist.comm import GroupSpec, Meter, barrier, bind
from minidist.config import CommConfig, Config
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.simple import collectives
from minidist.simple.parallelize import group_specs, parallelize
from minidist.tools.deadlock.nccl_rules import find_nccl_violations
from minidist.tools.network.sockets import count_tcp_bytes_sent

SIZES = (0, 1, 2, 5, 12, 37)
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def inputs(num_ranks: int, size: int) -> torch.Tensor:
    """Whole numbers, so that every order of additions gives the same: (ranks, size)."""
    return torch.randint(1, 5, (num_ranks, size), generator=torch.Generator().manual_seed(size)).double()


def data_group(world):
    return bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]


def run_all(world):
    group, found = data_group(world), {}
    for size in SIZES:
        for op in REDUCTIONS:
            for name, all_reduce in collectives.ALL_REDUCE.items():
                tensor = inputs(world.size, size)[world.rank].clone()
                all_reduce(tensor, group, op)
                found[name, size, op] = tensor
            for root in range(world.size):
                tensor = inputs(world.size, size)[world.rank].clone()
                collectives.tree_reduce(tensor, root, group, op)
                found["tree_reduce", size, op, root] = tensor
        for root in range(world.size):
            tensor = inputs(world.size, size)[world.rank].clone()
            collectives.tree_broadcast(tensor, root, group)
            found["tree_broadcast", size, root] = tensor
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7])
def test_collectives_give_what_one_process_computes(ranks, num_ranks):
    for rank, found in enumerate(ranks(run_all, num_ranks)):
        for (name, size, *rest), tensor in found.items():
            given = inputs(num_ranks, size)
            if name == "tree_broadcast":
                assert torch.equal(tensor, given[rest[0]])
            elif name != "tree_reduce" or rest[1] == rank:
                assert torch.equal(tensor, REDUCTIONS[rest[0]](given, 0)), (name, size, rest)


def all_reduce_numbers(world):
    """By algorithm: sums of several dtypes and shapes, of numbers that round, and with NaN."""
    group, found = data_group(world), {}
    for name, all_reduce in collectives.ALL_REDUCE.items():
        whole = [inputs(world.size, 12)[world.rank].to(dtype).view(2, 1, 6) for dtype in DTYPES]
        rounding = torch.linspace(0.1, 1.1, 7) * (world.rank + 1) ** 3
        invalid = torch.tensor([torch.nan if world.rank == 1 else 1.0, 2.0])
        for tensor in (*whole, rounding):
            all_reduce(tensor, group)
        all_reduce(invalid, group, "max")
        found[name] = whole, rounding, invalid
    return found


def test_all_ranks_get_the_same_bits_of_any_dtype(ranks):
    every = ranks(all_reduce_numbers, 5)
    for name in collectives.ALL_REDUCE:
        for whole, rounding, invalid in (found[name] for found in every):
            for dtype, tensor in zip(DTYPES, whole, strict=True):
                assert tensor.dtype == dtype and torch.equal(tensor.double().view(-1), inputs(5, 12).sum(0))
            assert torch.equal(rounding, every[0][name][1]), name
            torch.testing.assert_close(rounding, torch.linspace(0.1, 1.1, 7) * 225)
            assert invalid[0].isnan() and invalid[1] == 2.0


def record_transfers(world, size):
    """{collective: records of one call on `size` float32 elements, with root 0}."""
    group, found = data_group(world), {}
    calls = {
        "tree_broadcast": lambda tensor: collectives.tree_broadcast(tensor, 0, group),
        "tree_reduce": lambda tensor: collectives.tree_reduce(tensor, 0, group),
        **{name: lambda t, run=run: run(t, group) for name, run in collectives.ALL_REDUCE.items()},
    }
    for name, call in calls.items():
        group.meter.records.clear()
        call(torch.ones(size))
        found[name] = list(group.meter.records)
    return found


def sent_elements(records) -> int:
    assert all(record.name in ("send", "recv") and not record.modelled for record in records)
    return sum(record.wire_bytes for record in records) // 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_each_rank_sends_what_the_algorithm_says(ranks, num_ranks):
    size = 13
    chunks = [len(chunk) for chunk in torch.ones(size).tensor_split(num_ranks)]
    active = 1 << (num_ranks.bit_length() - 1)
    folded = num_ranks - active
    by_name = {}
    for rank, found in enumerate(ranks(record_transfers, num_ranks, size)):
        for name, records in found.items():
            by_name.setdefault(name, []).append(sent_elements(records))
        # All but the chunk that it completes, then all but the chunk after its own.
        assert by_name["ring"][rank] == 2 * size - chunks[rank] - chunks[(rank + 1) % num_ranks]
        levels = active.bit_length() - 1
        rounds = sum(record.name == "send" for record in found["doubling"])
        if rank < 2 * folded:
            assert rounds == (1 if rank % 2 else 2 * levels + 1)
        else:
            assert rounds == 2 * levels
    assert by_name["tree_reduce"] == [0] + [size] * (num_ranks - 1)
    assert sum(by_name["tree_broadcast"]) == size * (num_ranks - 1)
    assert sum(by_name["ring"]) == 2 * size * (num_ranks - 1)
    assert sum(by_name["doubling"]) == 2 * size * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_transfers_obey_the_nccl_rules(ranks, num_ranks):
    """NCCL, unlike gloo, needs transfers in both directions to be batched: two ranks that send to each other hang."""
    found = ranks(record_transfers, num_ranks, 7)
    records = {rank: [record for each in by_name.values() for record in each] for rank, by_name in enumerate(found)}
    assert all(len(log) > 8 for log in records.values()) and find_nccl_violations(records) == []


def metered_and_kernel_bytes(world):
    """{algorithm: (bytes that the meter counted, bytes that the kernel sent, transfers)} of this rank."""
    group, found = data_group(world), {}
    for name, all_reduce in collectives.ALL_REDUCE.items():
        barrier(group)
        group.meter.records.clear()
        kernel = count_tcp_bytes_sent()
        all_reduce(torch.ones(30_001), group)
        kernel = count_tcp_bytes_sent() - kernel
        records = list(group.meter.records)
        found[name] = 4 * sent_elements(records), kernel, len(records)
        barrier(group)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_metered_bytes_match_those_sent_by_the_kernel(ranks, num_ranks):
    for found in ranks(metered_and_kernel_bytes, num_ranks, backend="gloo"):
        for name, (metered, kernel, transfers) in found.items():
            # gloo sends 48 bytes before the data, 48 to say that there is some, and 48 to say that there is room for
            # it; messages of the barriers around it may still be in flight.
            assert 0 <= kernel - metered <= 96 * transfers + 400, f"{name}: {metered} bytes metered, {kernel} sent"


def reduce_gradients(world, algorithm):
    """Reduce one gradient per parameter as `--comm.algorithm` says; return a sum and the names of the operations."""
    model = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
    config = Config(model=model, comm=CommConfig(gradients="naive", algorithm=algorithm), engine="simple")
    mesh = Mesh(dp=world.size)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    reducer = parallelize(Transformer(model), groups, config).reducer
    groups.meter.records.clear()
    reducer.clear()
    for name, parameter in reducer.parameters.items():
        reducer.add(name, torch.full_like(parameter, world.rank + 1.0))
    reducer.finish()
    names = {record.name for record in groups.meter.records if record.shape != (len(reducer.parameters),)}
    return {gradient for master in reducer.masters.values() for gradient in master.grad.unique().tolist()}, names


@pytest.mark.parametrize("algorithm", ["backend", *collectives.ALL_REDUCE])
def test_a_run_reduces_its_gradients_by_the_algorithm_of_the_option(ranks, algorithm):
    expected = {"all_reduce"} if algorithm == "backend" else {"send", "recv"}
    assert ranks(reduce_gradients, 3, algorithm) == [({6.0}, expected)] * 3


def test_the_cost_model_at_hand_computed_values():
    """4 MB, 1 ms, 1 GB/s. 4 ranks send 4 MB twice in two rounds (tree), or 6 MB in all; of 6, two are folded."""
    assert collectives.time_s("tree", 4, 4e6, 1e-3, 1e9) == pytest.approx(4 * 1e-3 + 16e-3)
    assert collectives.time_s("ring", 4, 4e6, 1e-3, 1e9) == pytest.approx(6 * 1e-3 + 6e-3)
    assert collectives.time_s("doubling", 4, 4e6, 1e-3, 1e9) == pytest.approx(4 * 1e-3 + 6e-3)
    assert collectives.time_s("doubling", 6, 4e6, 1e-3, 1e9) == pytest.approx(6 * 1e-3 + 14e-3)
    assert [collectives.time_s(name, 1, 4e6, 1e-3, 1e9) for name in collectives.ALL_REDUCE] == [0, 0, 0]
    with pytest.raises(ValueError, match="possible are tree, ring, doubling"):
        collectives.time_s("star", 4, 1, 1, 1)
