"""Reduced gradients of data parallelism, against one process, torch's DDP, and other bucket sizes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.parallel.data.buckets import assign_buckets
from minidist.parallel.data.reducer import find_gradient_group, register_gradient_hooks
from minidist.parallel.data.replicate import broadcast_model, make_reducer
from minidist.parameters import Box, ParamSpec, named_parameters, replicated_specs
from tests.helpers.processes import DEFAULT_CPU_BACKEND

# Kind of reducer and size of a bucket in MiB.
KINDS = [("naive", 1.0), ("bucketed", 1.0), ("bucketed", 1e-4), ("bucketed", 1e-9)]
EACH_KIND = ["naive", "bucketed"]


class Net(nn.Module):
    """A net with tied weights, a frozen, an unused and a rarely used parameter (if x[:, 0] < -1), and a buffer."""

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


def make_net(seed: int, dtype=torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def make_samples(rank: int, micro_batch: int, dtype=torch.float64) -> torch.Tensor:
    """The samples of one rank, 3 + rank of them; only rank 1 has one that uses the rare parameter."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    x = torch.randn(3 + rank, 7, generator=generator, dtype=torch.float64).clamp(-1, 1)
    if rank == 1 and micro_batch == 0:
        x[0, 0] = -2.0
    return x.to(dtype)


def set_up(world: World, kind: str, mib: float, dtype=torch.float64):
    """A replica synchronized from different starting values, its reducer, and the meter."""
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))], meter=Meter())
    model = make_net(world.rank, dtype)
    with torch.no_grad():
        model.scale.fill_(0.5 + world.rank)
        model.frozen.fill_(1.0 + world.rank)
    broadcast_model(model, groups["grads"])
    parameters = named_parameters(model)
    specs = replicated_specs(model, groups["grads"].ranks)
    return model, make_reducer(kind, parameters, specs, [groups["grads"]], mib), groups.meter


def reduce_gradients(world: World, kind: str, mib: float, micro_batches: int, dtype=torch.float64) -> tuple[dict, list]:
    """The reduced gradients of one step, and the number of operations after each micro-batch's backward."""
    model, reducer, meter = set_up(world, kind, mib, dtype)
    last, sent = False, []
    register_gradient_hooks(named_parameters(model), reducer, lambda: last)
    meter.records.clear()
    for i in range(micro_batches):
        last = i == micro_batches - 1
        model(make_samples(world.rank, i, dtype)).backward()
        sent.append(len(meter.records))
    reducer.finish_reductions()
    return {name: p.grad for name, p in named_parameters(model).items()}, sent


def reference_gradients(world_size: int, micro_batches: int) -> dict:
    """The gradient of the loss summed over the samples of all ranks, in one backward, in float64."""
    model = make_net(0)
    model(torch.cat([make_samples(rank, i) for rank in range(world_size) for i in range(micro_batches)])).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind, mib", KINDS)
def test_gradients_are_those_of_one_process(ranks, size, kind, mib):
    expected = reference_gradients(size, 2)
    assert expected["never"] is None and expected["frozen"] is None and (expected["rare"] is None) == (size == 1)
    for got, _ in ranks(reduce_gradients, size, kind, mib, 2):
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            if grad is None:
                assert got[name] is None, name
            else:
                # Sums of some tens of float64 terms of like size, in another order: 1e-13 of the largest is 500 eps.
                error = (got[name] - grad).abs().max() / grad.abs().max()
                assert error < 1e-13, f"{name}: {error}"


@pytest.mark.parametrize("kind, mib", KINDS[:-1])
def test_only_the_last_micro_batch_communicates(ranks, kind, mib):
    for _, sent in ranks(reduce_gradients, 2, kind, mib, 3):
        assert sent[:2] == [0, 0]


def test_buckets_are_launched_inside_backward_and_other_reductions_after_it(ranks):
    assert all(sent[-1] > 1 for _, sent in ranks(reduce_gradients, 2, "bucketed", 1e-4, 1))
    assert all(sent[-1] == 0 for _, sent in ranks(reduce_gradients, 2, "naive", 1.0, 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_naive_and_bucketed_reducers_agree(ranks, size):
    """Different data on every rank, 3 + rank samples; the order of the terms of a sum may differ."""
    fast = ranks(reduce_gradients, size, "bucketed", 1e-4, 2)
    for (got, _), (expected, _) in zip(ranks(reduce_gradients, size, "naive", 1.0, 2), fast, strict=True):
        for name, grad in expected.items():
            if grad is None:
                assert got[name] is None, name
            else:  # a sum of at most four float64 terms: 1e-14 of the largest is 45 eps
                torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-14 * float(grad.abs().max()))


def sums_over_two_groups(world: World, kind: str, mib: float) -> dict:
    """Gradients of four parameters, two of which all ranks contribute to and two only the ranks of one dp group."""
    groups = bind(world, Mesh(dp=2, tp=2), [GroupSpec("grads", ("dp",)), GroupSpec("all", ("dp", "tp"))], meter=Meter())
    parameters = {name: nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for name in "abcd"}
    box = (Box.whole((3, 2)),)
    ranks_of = {name: groups["grads" if name in "ac" else "all"].ranks for name in parameters}
    specs = {name: ParamSpec(name, (3, 2), box, ranks_of[name], ranks_of[name]) for name in parameters}
    reducer = make_reducer(kind, parameters, specs, groups.values(), mib)
    for i, name in enumerate("dcba"):
        if name != "b" or world.rank == 3:  # one rank alone uses b
            reducer.accumulate(name, torch.full((3, 2), 10.0**i * (world.rank + 1), dtype=torch.float64))
            reducer.mark_ready(name)
    reducer.finish_reductions()
    return {name: parameter.grad.unique().tolist() for name, parameter in parameters.items()}


@pytest.mark.parametrize("kind, mib", KINDS)
def test_each_parameter_is_summed_over_its_own_group(ranks, kind, mib):
    for rank, got in enumerate(ranks(sums_over_two_groups, 4, kind, mib)):
        pair = 1 + 3 if rank % 2 == 0 else 2 + 4  # the ranks of a dp group, counted from 1
        assert got == {"a": [1000.0 * pair], "b": [400.0], "c": [10.0 * pair], "d": [1.0 + 2 + 3 + 4]}


def test_gradients_do_not_depend_on_bucket_size_bit_for_bit_at_two_ranks(ranks):
    runs = [ranks(reduce_gradients, 2, kind, mib, 2, torch.float32) for kind, mib in KINDS]
    for run in runs[1:]:
        for (got, _), (expected, _) in zip(run, runs[0], strict=True):
            assert all(got[name] is None if g is None else torch.equal(got[name], g) for name, g in expected.items())


def test_gradients_depend_on_bucket_size_only_by_rounding_at_four_ranks(ranks):
    """gloo's ring adds an element of another chunk in another order: (N-1) eps sum|x| is the bound."""

    def reduced(mib, backend):
        return ranks(reduce_gradients, 4, "bucketed", mib, 1, torch.float32, backend=backend)[0][0]

    big, small = reduced(1.0, "gloo"), reduced(1e-9, "gloo")
    bound = {}
    for rank in range(4):
        model = make_net(0, torch.float32)
        model(make_samples(rank, 0, torch.float32)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                bound[name] = bound.get(name, 0) + p.grad.abs()
    eps = torch.finfo(torch.float32).eps
    assert any(not torch.equal(big[name], small[name]) for name in bound), "equal numbers would not test the bound"
    for name, total in bound.items():
        assert ((big[name] - small[name]).abs() <= 3 * eps * total).all(), name
    if DEFAULT_CPU_BACKEND == "shm":  # adds in rank order, whatever the bucket size
        big, small = reduced(1.0, "shm"), reduced(1e-9, "shm")
        assert all(torch.equal(big[name], small[name]) for name in bound)


def gradients_of_ddp(world: World) -> dict:
    model = make_net(world.rank)
    group = dist.group.WORLD
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    (wrapped(make_samples(world.rank, 0)) * world.size).backward()  # DDP averages
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", EACH_KIND)
def test_gradients_are_those_of_torchs_ddp(ranks, size, kind):
    for theirs, (ours, _) in zip(
        ranks(gradients_of_ddp, size, backend="gloo"), ranks(reduce_gradients, size, kind, 1e-4, 1), strict=True
    ):
        for name, grad in theirs.items():
            if grad is None or ours[name] is None:
                assert grad is ours[name] or not grad.any(), name
            else:
                torch.testing.assert_close(ours[name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))


def state_after_start(world: World) -> dict:
    model, _, meter = set_up(world, "naive", 1.0)
    return {**dict(model.state_dict()), "sent": [r.name for r in meter.records]}


def test_replicas_start_as_rank_0(ranks):
    expected = make_net(0).state_dict()
    for state in ranks(state_after_start, 3):
        sent = state.pop("sent")
        assert all(
            torch.equal(state[name], value) for name, value in expected.items() if name not in ("scale", "frozen")
        )
        assert state["scale"].tolist() == [0.5] * 5 and state["frozen"].tolist() == [1.0] * 5
        # Each tensor once: the tied weight is not sent twice.
        assert sent == ["broadcast"] * 9


def run_two_steps(world: World, kind: str) -> list[dict]:
    """Run the same step twice, with `clear_gradients` in between; return both gradients."""
    model, reducer, _ = set_up(world, kind, 1e-4)
    register_gradient_hooks(named_parameters(model), reducer, lambda: True)
    steps = []
    for _ in range(2):
        model(make_samples(world.rank, 0)).backward()
        reducer.finish_reductions()
        reducer.scale_gradients(2.0)
        steps.append({name: None if p.grad is None else p.grad.clone() for name, p in named_parameters(model).items()})
        reducer.clear_gradients()
        assert all(p.grad is None for p in model.parameters())
    return steps


@pytest.mark.parametrize("kind", EACH_KIND)
def test_clear_leaves_nothing_of_a_step(ranks, kind):
    for first, second in ranks(run_two_steps, 2, kind):
        assert all(second[name] is None if g is None else torch.equal(second[name], g) for name, g in first.items())


def test_buckets_are_consecutive_and_within_their_size():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 4, "f": 5}
    assert assign_buckets(sizes, 8) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert assign_buckets(sizes, 1) == [[name] for name in sizes]
    assert assign_buckets({}, 8) == []


def test_replicas_without_a_group_are_refused():
    groups = bind(World.single(), Mesh())
    with pytest.raises(KeyError, match=r"no group was bound over ranks \(0, 1\), which contribute to parameter hidden"):
        find_gradient_group(replicated_specs(Net(), (0, 1))["hidden.weight"], groups.values())


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_gradient_after_its_ready_is_refused(kind):
    model, reducer, _ = set_up(World.single(), kind, 1e-4)
    reducer.accumulate("never", torch.ones(3, dtype=torch.float64))
    reducer.mark_ready("never")
    with pytest.raises(RuntimeError, match="a gradient of never came after mark_ready"):
        reducer.accumulate("never", torch.ones(3, dtype=torch.float64))
    reducer.clear_gradients()
    reducer.accumulate("never", torch.ones(3, dtype=torch.float64))
    reducer.finish_reductions()
    assert model.never.grad.tolist() == [1.0] * 3


def abort_with_bucket_in_flight(world: World) -> list:
    """Abort a step while its first bucket is in flight; return that bucket's gradient after the next step has begun."""
    model, reducer, meter = set_up(world, "bucketed", 1e-9)
    meter.records.clear()
    reducer.accumulate("tied.bias", torch.full((5,), 100.0, dtype=torch.float64))
    reducer.mark_ready("tied.bias")
    assert len(meter.records) == 1
    before = reducer._buckets[0]
    reducer.clear_gradients()
    reducer.accumulate("tied.bias", torch.full((5,), 7.0, dtype=torch.float64))
    before.handle.wait()
    return before.buffer[:5].tolist()


def test_an_aborted_step_does_not_reuse_buffers_in_flight(ranks):
    assert ranks(abort_with_bucket_in_flight, 2) == [[200.0] * 5] * 2
