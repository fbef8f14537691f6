"""Data parallelism at the level of gradients: against one process, against torch's DDP, and against itself."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.parallel.data.buckets import assign
from minidist.parallel.data.reducer import collect, group_of
from minidist.parallel.data.replicate import make_reducer, synchronize
from minidist.parameters import named_parameters, replicated_specs
from tests.helpers.processes import AUTO

KINDS = [("naive", 1.0), ("bucketed", 1.0), ("bucketed", 1e-4), ("bucketed", 1e-9)]


class Net(nn.Module):
    """Tied weights, a frozen parameter, one nobody uses, one that only a negative first input uses, and a buffer."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Linear(7, 5, bias=False, dtype=dtype)
        self.hidden = nn.Linear(5, 5, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.never = nn.Parameter(torch.ones(3, dtype=dtype))
        self.rare = nn.Parameter(torch.ones(5, dtype=dtype))
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.contiguous())
        self.tied = nn.Linear(5, 5, dtype=dtype)
        self.tied.weight = self.hidden.weight
        self.register_buffer("scale", torch.full((5,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, 7) -> the sum of a loss over the samples."""
        hidden = torch.tanh(self.hidden(self.embed(x))) * self.frozen * self.scale
        hidden = torch.tanh(self.tied(hidden))
        loss = (self.head(hidden) - x).square().sum()
        if (chosen := x[x[:, 0] < -1]).numel():
            loss = loss + (self.embed(chosen) * self.rare).sum()
        return loss


def seeded(seed: int, dtype=torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def data(rank: int, micro_batch: int, dtype=torch.float64) -> torch.Tensor:
    """The samples of one rank: another number of them on each; a rare one on rank 1 only."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    x = torch.randn(3 + rank, 7, generator=generator, dtype=torch.float64).clamp(-1, 1)
    if rank == 1 and micro_batch == 0:
        x[0, 0] = -2.0
    return x.to(dtype)


def set_up(world: World, kind: str, mib: float, dtype=torch.float64):
    """A replica that started different from the others', its reducer, and the meter."""
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))], meter=Meter())
    model = seeded(world.rank, dtype)
    with torch.no_grad():
        model.scale.fill_(0.5 + world.rank)
        model.frozen.fill_(1.0 + world.rank)
    synchronize(model, groups["grads"])
    parameters = named_parameters(model)
    specs = replicated_specs(model, groups["grads"].ranks)
    return model, make_reducer(kind, parameters, specs, [groups["grads"]], mib), groups.meter


def gradients(world: World, kind: str, mib: float, micro_batches: int, dtype=torch.float64) -> tuple[dict, list]:
    """The reduced gradients of one step, and what was sent after each micro-batch's backward."""
    model, reducer, meter = set_up(world, kind, mib, dtype)
    last, sent = False, []
    collect(named_parameters(model), reducer, lambda: last)
    meter.records.clear()
    for i in range(micro_batches):
        last = i == micro_batches - 1
        model(data(world.rank, i, dtype)).backward()
        sent.append(len(meter.records))
    reducer.finish()
    return {name: p.grad for name, p in named_parameters(model).items()}, sent


def one_process(world_size: int, micro_batches: int) -> dict:
    """The gradient of the sum over everybody's samples, in one backward, in float64."""
    model = seeded(0)
    model(torch.cat([data(rank, i) for rank in range(world_size) for i in range(micro_batches)])).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind, mib", KINDS)
def test_gradients_are_those_of_one_process(ranks, size, kind, mib):
    want = one_process(size, 2)
    assert want["never"] is None and want["frozen"] is None and (want["rare"] is None) == (size == 1)
    for got, _ in ranks(gradients, size, kind, mib, 2):
        assert got.keys() == want.keys()
        for name, grad in want.items():
            if grad is None:
                assert got[name] is None, name
            else:
                # Sums of some tens of float64 terms of like size, in another order: 1e-13 of the largest is 500 eps.
                error = (got[name] - grad).abs().max() / grad.abs().max()
                assert error < 1e-13, f"{name}: {error}"


@pytest.mark.parametrize("kind, mib", KINDS[:3])
def test_inner_micro_batches_send_nothing(ranks, kind, mib):
    for _, sent in ranks(gradients, 2, kind, mib, 3):
        assert sent[:2] == [0, 0]


def test_buckets_leave_inside_backward_and_naive_ones_after_it(ranks):
    assert all(sent[-1] > 1 for _, sent in ranks(gradients, 2, "bucketed", 1e-4, 1))
    assert all(sent[-1] == 0 for _, sent in ranks(gradients, 2, "naive", 1.0, 1))


def test_gradients_do_not_depend_on_bucket_size_bit_for_bit_at_two_ranks(ranks):
    runs = [ranks(gradients, 2, kind, mib, 2, torch.float32) for kind, mib in KINDS]
    for run in runs[1:]:
        for (got, _), (want, _) in zip(run, runs[0], strict=True):
            assert all(got[name] is None if g is None else torch.equal(got[name], g) for name, g in want.items())


def test_gradients_hardly_depend_on_bucket_size_at_four_ranks(ranks):
    """gloo's ring adds an element of another chunk in another order: (N-1) eps sum|x| is the bound."""

    def reduced(mib, backend):
        return ranks(gradients, 4, "bucketed", mib, 1, torch.float32, backend=backend)[0][0]

    big, small = reduced(1.0, "gloo"), reduced(1e-9, "gloo")
    bound = {}
    for rank in range(4):
        model = seeded(0, torch.float32)
        model(data(rank, 0, torch.float32)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                bound[name] = bound.get(name, 0) + p.grad.abs()
    eps = torch.finfo(torch.float32).eps
    assert any(not torch.equal(big[name], small[name]) for name in bound), "the bound would be tested on equal numbers"
    for name, total in bound.items():
        assert ((big[name] - small[name]).abs() <= 3 * eps * total).all(), name
    if AUTO == "shm":  # which adds in the order of the ranks, whatever the bucket
        big, small = reduced(1.0, "shm"), reduced(1e-9, "shm")
        assert all(torch.equal(big[name], small[name]) for name in bound)


def under_ddp(world: World) -> dict:
    model = seeded(world.rank)
    group = dist.group.WORLD
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    (wrapped(data(world.rank, 0)) * world.size).backward()  # DDP averages
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_torchs_ddp(ranks, size):
    for theirs, (ours, _) in zip(
        ranks(under_ddp, size, backend="gloo"), ranks(gradients, size, "bucketed", 1e-4, 1), strict=True
    ):
        for name, grad in theirs.items():
            if grad is None or ours[name] is None:
                assert grad is ours[name] or not grad.any(), name
            else:
                torch.testing.assert_close(ours[name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))


def start(world: World) -> dict:
    model, _, meter = set_up(world, "naive", 1.0)
    return {**dict(model.state_dict()), "sent": [r.name for r in meter.records]}


def test_replicas_that_start_different_are_made_those_of_rank_zero(ranks):
    want = seeded(0).state_dict()
    for state in ranks(start, 3):
        sent = state.pop("sent")
        assert all(torch.equal(state[name], value) for name, value in want.items() if name not in ("scale", "frozen"))
        assert state["scale"].tolist() == [0.5] * 5 and state["frozen"].tolist() == [1.0] * 5
        # Each tensor once: the tied weight is not sent twice.
        assert sent == ["broadcast"] * 9


def two_steps(world: World, kind: str) -> list[dict]:
    """The same step twice, with a clear between: nothing of the first is left in the second."""
    model, reducer, _ = set_up(world, kind, 1e-4)
    collect(named_parameters(model), reducer, lambda: True)
    steps = []
    for _ in range(2):
        model(data(world.rank, 0)).backward()
        reducer.finish()
        reducer.scale(2.0)
        steps.append({name: None if p.grad is None else p.grad.clone() for name, p in named_parameters(model).items()})
        reducer.clear()
        assert all(p.grad is None for p in model.parameters())
    return steps


@pytest.mark.parametrize("kind", ["naive", "bucketed"])
def test_a_step_leaves_nothing_to_the_next(ranks, kind):
    for first, second in ranks(two_steps, 2, kind):
        assert all(second[name] is None if g is None else torch.equal(second[name], g) for name, g in first.items())


def test_buckets_are_consecutive_and_within_their_size():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 4, "f": 5}
    assert assign(sizes, 8) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert assign(sizes, 1) == [[name] for name in sizes]
    assert assign({}, 8) == []


def test_replicas_without_a_group_are_refused():
    groups = bind(World.single(), Mesh())
    with pytest.raises(KeyError, match=r"no group was bound over ranks \(0, 1\), which contribute to parameter hidden"):
        group_of(replicated_specs(Net(), (0, 1))["hidden.weight"], groups.values())


@pytest.mark.parametrize("kind", ["naive", "bucketed"])
def test_a_gradient_after_its_ready_is_refused(kind):
    model, reducer, _ = set_up(World.single(), kind, 1e-4)
    reducer.add("never", torch.ones(3, dtype=torch.float64))
    reducer.ready("never")
    with pytest.raises(RuntimeError, match="a gradient of never came after ready"):
        reducer.add("never", torch.ones(3, dtype=torch.float64))
    reducer.clear()
    reducer.add("never", torch.ones(3, dtype=torch.float64))
    reducer.finish()
    assert model.never.grad.tolist() == [1.0] * 3


def broken_off(world: World) -> list:
    """A step is aborted while its first bucket is in flight; the next one must not touch that memory."""
    model, reducer, meter = set_up(world, "bucketed", 1e-9)
    meter.records.clear()
    reducer.add("tied.bias", torch.full((5,), 100.0, dtype=torch.float64))
    reducer.ready("tied.bias")
    assert len(meter.records) == 1
    before = reducer._buckets[0]
    reducer.clear()
    assert reducer._buckets[0].buffer.data_ptr() != before.buffer.data_ptr()
    before.handle.wait()
    return before.views["tied.bias"].tolist()


def test_a_step_that_is_broken_off_keeps_the_memory_of_what_is_on_its_way(ranks):
    assert ranks(broken_off, 2) == [[200.0] * 5] * 2
