"""The functional collectives: values, gradients, and a compiled block that still counts its bytes."""

import pytest
import torch

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm import functional as ops
from minidist.mesh import Mesh


def run_operations(world: World) -> list[torch.Tensor]:
    """Each operation's result, and the gradient of sum_ranks(weight * result) with respect to this rank's input."""
    groups = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))])
    key, n = groups["tp"].key, world.size
    results = []
    for name, extra in (("all_reduce", ()), ("all_gather", (n,)), ("reduce_scatter", (n,)), ("all_to_all", ())):
        x = make_input(world.rank, n).requires_grad_()
        y = getattr(ops, name)(x, key, *extra)
        weight = make_weight(world.rank, y.shape)
        (y * weight).sum().backward()
        results += [y.detach(), x.grad]
    return results


def make_input(rank: int, n: int) -> torch.Tensor:
    return torch.arange(2 * n * 3, dtype=torch.float64).reshape(2 * n, 3).sin() + rank


def make_weight(rank: int, shape) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).cos() * (rank + 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_values_and_gradients_are_those_of_one_process(ranks, n):
    xs = [make_input(rank, n).requires_grad_() for rank in range(n)]
    total, rows = sum(xs), xs[0].shape[0] // n
    results = {
        "all_reduce": [total] * n,
        "all_gather": [torch.cat(xs)] * n,
        "reduce_scatter": list(total.split(rows)),
        "all_to_all": [torch.cat([x.split(rows)[rank] for x in xs]) for rank in range(n)],
    }
    expected = {}
    for name, ys in results.items():
        loss = sum((y * make_weight(rank, y.shape)).sum() for rank, y in enumerate(ys))
        expected[name] = ys, torch.autograd.grad(loss, xs, retain_graph=True)
    for rank, found in enumerate(ranks(run_operations, n)):
        for i, name in enumerate(results):
            # Sums of at most 3 numbers of size 10, in any order: 1e-14 is more than their 2 rounding errors.
            torch.testing.assert_close(found[2 * i], expected[name][0][rank].detach(), atol=1e-14, rtol=1e-14)
            torch.testing.assert_close(found[2 * i + 1], expected[name][1][rank], atol=1e-14, rtol=1e-14)


def run_eager_and_compiled(world: World) -> tuple:
    groups = bind(world, Mesh(tp=world.size), [GroupSpec("tp", ("tp",))], meter=Meter())
    key, n, meter = groups["tp"].key, world.size, groups.meter

    def block(x):
        return ops.all_reduce(torch.tanh(x) * 2, key) + ops.all_gather(x, key, n).sum()

    sent = {}
    for name, function in (("eager", block), ("compiled", torch.compile(block, fullgraph=True, backend="aot_eager"))):
        meter.records.clear()
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        function(x).sum().backward()
        sent[name] = (sorted((r.name, r.wire_bytes) for r in meter.records), x.grad)
    return sent["eager"], sent["compiled"]


def test_a_block_compiles_in_one_graph_and_its_bytes_are_counted(ranks):
    for eager, compiled_ in ranks(run_eager_and_compiled, 2):
        assert eager[0] == compiled_[0] and len(eager[0]) == 4
        # The same operations in float64; the compiler may reorder a sum of 8 numbers of size 10.
        torch.testing.assert_close(eager[1], compiled_[1], atol=1e-13, rtol=1e-13)


def test_fake_kernels_have_the_shapes_of_the_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(6, 5)
        assert ops.all_reduce(x, "g").shape == (6, 5)
        assert ops.all_gather(x, "g", 3).shape == (18, 5)
        assert ops.reduce_scatter(x, "g", 3).shape == (2, 5)
        assert ops.all_to_all(x, "g").shape == (6, 5)
