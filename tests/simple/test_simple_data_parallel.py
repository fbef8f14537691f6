"""The gradient reducers of `minidist.simple`, against one process, torch's DDP and the fast trainer's reducer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.parallel.data.assignment import assign_buckets as fast_assign_buckets
from minidist.parameters import named_parameters
from minidist.simple.data_parallel import (
    BucketedReducer,
    NaiveReducer,
    assign_buckets,
    broadcast_model,
    register_gradient_hooks,
)

KINDS = {"naive": None, "one bucket": 1 << 20, "buckets": 100, "a bucket each": 1}  # bucket_bytes


class Net(nn.Module):
    """A net with tied weights, an unused and a rarely used parameter (if x[:, 0] < -1), and a buffer."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Linear(7, 5, bias=False, dtype=dtype)
        self.hidden = nn.Linear(5, 5, dtype=dtype)
        self.never, self.rare = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
        self.tied = nn.Linear(5, 5, dtype=dtype)
        self.tied.weight = self.hidden.weight
        self.register_buffer("scale", torch.full((5,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, 7) -> the sum of a loss over the samples."""
        hidden = torch.tanh(self.tied(torch.tanh(self.hidden(self.embed(x))) * self.scale))
        loss = hidden.square().sum()
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


def reduce_gradients(world: World, kind: str, dtype=torch.float64) -> tuple[list[dict], list[int]]:
    """The gradients of two equal steps of two micro-batches; how many operations each backward of the first launches.

    The models start from different values on the ranks, and rank 0's are broadcast.
    """
    group = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))], meter=(meter := Meter()))["grads"]
    model = make_net(world.rank, dtype)
    broadcast_model(model, group)
    parameters = named_parameters(model)
    if kind == "naive":
        reducer = NaiveReducer(parameters, parameters, group, 2)
    else:
        reducer = BucketedReducer(parameters, parameters, group, 2, bucket_bytes=KINDS[kind])
    register_gradient_hooks(parameters, reducer.add)
    meter.records.clear()
    steps, launched = [], []
    for _ in range(2):
        reducer.clear()
        for i in range(2):
            before = len(meter.records)
            model(make_samples(world.rank, i, dtype)).backward()
            launched.append(len(meter.records) - before)
        reducer.finish()
        steps.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
    return steps, launched


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(ranks, size, kind):
    model = make_net(0)
    model(torch.cat([make_samples(rank, i) for rank in range(size) for i in range(2)])).backward()
    for steps, _ in ranks(reduce_gradients, size, kind):
        for step in steps:
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    assert step[name] is None, name
                else:  # sums of some tens of float64 terms of like size, in another order: 1e-13 is 500 eps
                    largest = float(parameter.grad.abs().max())
                    torch.testing.assert_close(step[name], parameter.grad, rtol=0, atol=1e-13 * largest)


def test_buckets_are_launched_inside_the_last_backward(ranks):
    for _, launched in ranks(reduce_gradients, 2, "buckets"):
        assert launched == [0, 3] * 2  # nobody uses `never`: finish() launches its bucket, the last one
    for _, launched in ranks(reduce_gradients, 2, "naive"):
        assert launched == [0] * 4


def test_gradients_do_not_depend_on_the_reducer_bit_for_bit_at_two_ranks(ranks):
    runs = [ranks(reduce_gradients, 2, kind, torch.float32) for kind in KINDS]
    for run in runs[1:]:
        for (steps, _), (expected, _) in zip(run, runs[0], strict=True):
            for name, grad in expected[0].items():
                assert steps[0][name] is None if grad is None else torch.equal(steps[0][name], grad), name


def gradients_of_ddp(world: World) -> dict:
    model = make_net(0)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=dist.group.WORLD, find_unused_parameters=True)
    (wrapped(torch.cat([make_samples(world.rank, i) for i in range(2)])) * world.size).backward()  # DDP averages
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_are_those_of_torchs_ddp(ranks):
    ours = ranks(reduce_gradients, 2, "buckets")
    for theirs, (steps, _) in zip(ranks(gradients_of_ddp, 2, backend="gloo"), ours, strict=True):
        for name, grad in theirs.items():
            if grad is None or steps[0][name] is None:
                assert steps[0][name] is None and (grad is None or not grad.any()), name
            else:
                torch.testing.assert_close(steps[0][name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))


@pytest.mark.parametrize("limit", [1, 8, 100])
def test_buckets_are_those_of_the_fast_trainer(limit):
    for sizes in ({"a": 4, "b": 4, "c": 9, "d": 1, "e": 4, "f": 5}, {}):
        assert assign_buckets(sizes, limit) == fast_assign_buckets(sizes, limit)
    assert assign_buckets({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]
