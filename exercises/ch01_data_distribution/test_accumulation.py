"""Tests of accumulation: a reducer that records its calls, and a real one; the reference is autograd in one process."""

import torch
from torch import nn

from exercises.testing import expect, test
from minidist.comm import all_reduce
from minidist.parallel.data.simple import FlatReducer
from minidist.parameters import named_parameters, replicated_specs


class Notes:
    """A reducer that accumulates, and sends a gradient when it is ready: later additions are not in the sum."""

    def __init__(self, group):
        self.group, self.sums, self.calls, self.sent = group, {}, [], {}

    def accumulate(self, name, grad):
        self.calls.append(("add", name))
        self.sums[name] = self.sums[name] + grad if name in self.sums else grad.clone()

    def mark_ready(self, name):
        expect(f"a gradient of {name} is added before it is ready", name in self.sums, True)
        self.calls.append(("ready", name))
        self.sent[name] = self.sums[name].clone()
        all_reduce(self.sent[name], self.group)


class Net(nn.Module):
    """`rare` is used by selected micro-batches, `never` by none; `frozen` does not require a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.0, -1.0]], dtype=torch.float64))
        self.rare = nn.Parameter(torch.tensor([2.0, 1.0], dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64), requires_grad=False)

    def forward(self, x, rare=False):
        """(b, 3) -> a loss sum. All its values are multiples of 2**-33, so that sums are exact in any order."""
        hidden = x @ self.weight.T * self.frozen
        loss = hidden.square().sum()
        return loss + (hidden @ self.rare).sum() if rare else loss


def data(rank, micro_batch):
    """(2 + rank, 3) numbers that differ by rank and micro-batch, with more digits than float32 has."""
    numbers = torch.arange(3.0 * (2 + rank), dtype=torch.float64).reshape(-1, 3)
    return (numbers + 2 * rank + micro_batch) % 5 - 2 + 2.0**-16


def run(answer, world, network, rare, each=lambda reducer: None):
    """One step; rare: whether each micro-batch uses the rare parameter. Returns the model and the reducer."""
    model, reducer, last = Net(), Notes(network.group), False
    answer.register_gradient_hooks(named_parameters(model), reducer, lambda: last)
    for i, uses in enumerate(rare):
        last = i == len(rare) - 1
        model(data(world.rank, i), uses).backward()
        each(reducer)
    return model, reducer


def reference(ranks, rare):
    """The gradients of all micro-batches of these ranks, in one backward."""
    model = Net()
    sum(model(data(rank, i), uses) for rank in ranks for i, uses in enumerate(rare)).backward()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}


@test(points=2)
def one_micro_batch(answer, world, network):
    """With one micro-batch every gradient is added once, then declared ready."""
    _, reducer = run(answer, world, network, [True])
    expected = reference([world.rank], [True])
    for name in ("weight", "rare"):
        calls = [kind for kind, of in reducer.calls if of == name]
        expect(f"the reducer's calls for {name}", calls, ["add", "ready"])
        expect(f"the gradient of {name} that was added", reducer.sums[name], expected[name])
    expect("the parameters whose gradients were added", sorted(reducer.sums), ["rare", "weight"])
    model, reducer = Net(), Notes(network.group)
    answer.register_gradient_hooks(named_parameters(model), reducer, lambda: True)
    for step, x in enumerate((data(world.rank, 0), data(world.rank, 1), torch.zeros(2, 3, dtype=torch.float64))):
        reducer.calls.clear()
        reducer.sums.clear()
        model(x, True).backward()
        calls = sorted((name, kind) for kind, name in reducer.calls)
        wanted = [("rare", "add"), ("rare", "ready"), ("weight", "add"), ("weight", "ready")]
        case = "all gradients are zero" if step == 2 else ""
        expect(f"the reducer's calls in step {step + 1}", calls, wanted, case=case)


@test(points=3, ranks=(2,))
def micro_batches_add_up(answer, world, network):
    """The sums equal the gradients of one backward over all micro-batches."""
    for count in (2, 3):
        _, reducer = run(answer, world, network, [True] * count)
        expected = reference([world.rank], [True] * count)
        for name in ("weight", "rare"):
            what = f"the sum of the gradients of {name} over {count} micro-batches"
            expect(what, reducer.sums[name], expected[name])


@test(points=3, ranks=(4,))
def sends_in_the_last_micro_batch_only(answer, world, network):
    """Only the last micro-batch sends: each gradient once, and complete."""
    sent = []
    _, reducer = run(answer, world, network, [True] * 3, lambda _: sent.append(len(network.records)))
    expect("operations sent by the end of each micro-batch", sent, [0, 0, 2])
    expected = reference(range(world.size), [True] * 3)
    for name in ("weight", "rare"):
        expect(f"the gradient of {name}, summed over ranks", reducer.sent[name], expected[name])


@test(points=2)
def partly_unused_parameters(answer, world, network):
    """A parameter that some micro-batches use gets the sum of their gradients; an unused one is never added."""
    for rare in ([True, False, False], [False, True, False], [False, True], [True, False, True], [False, False]):
        _, reducer = run(answer, world, network, rare)
        expected = reference([0], rare)
        case = f"micro-batches that use `rare`: {rare}"
        got = reducer.sums["rare"].tolist() if "rare" in reducer.sums else None
        expect("the sum of the gradients of rare", got, expected["rare"], case=case)
        expect(
            "never and frozen in the reducer", [name in reducer.sums for name in ("never", "frozen")], [False, False]
        )


@test(points=2)
def grad_is_none_after_backward(answer, world, network):
    """After every backward `.grad` is None, so the gradient exists only once, in the reducer."""
    model, left = Net(), []
    reducer = Notes(network.group)
    handles = answer.register_gradient_hooks(named_parameters(model), reducer, lambda: False)
    for i in range(2):
        model(data(0, i), True).backward()
        left.append([name for name, parameter in model.named_parameters() if parameter.grad is not None])
    expect("parameters with a .grad after each micro-batch", left, [[], []])
    for handle in handles:
        handle.remove()
    before = len(reducer.calls)
    model(data(0, 0), True).backward()
    expect("calls of the reducer after the hooks were removed", len(reducer.calls) - before, 0)


@test(points=4, ranks=(1, 2, 3))
def several_steps_of_a_real_reducer(answer, world, network):
    """Steps of 2, 1 and 3 micro-batches: the gradients of one process, and in every step the same number of bytes."""
    model, other, last, sent = Net(), Net(), False, []
    specs = replicated_specs(model, network.group.ranks)
    reducer = FlatReducer(named_parameters(model), specs, [network.group])
    answer.register_gradient_hooks(named_parameters(model), reducer, lambda: last)
    records = Notes(network.group)
    answer.register_gradient_hooks(named_parameters(other), records, lambda: False)
    for step, count in enumerate((2, 1, 3)):
        before = len(network.records)
        rare = [index == step for index in range(count)]  # in one micro-batch of steps 1 and 3
        for index, uses in enumerate(rare):
            last = index == count - 1
            other(data(0, 0)).backward()
            model(data(world.rank, index), uses).backward()
        reducer.finish_reductions()
        sent.append(sum(record.payload_bytes for record in network.records[before:]))
        expected = reference(range(world.size), rare)
        for name in ("weight", "rare", "never", "frozen"):
            grad = dict(model.named_parameters())[name].grad
            got = None if grad is None else grad.tolist()
            expect(f"the gradient of {name} in step {step + 1}", got, expected[name], case=f"{count} micro-batches")
        reducer.clear_gradients()
    expect("bytes reduced in each step", sent, sent[:1] * 3)
    alone = (6 * torch.tensor(reference([0], [False])["weight"], dtype=torch.float64)).tolist()
    expect("the sum of a second model's gradients, over 6 micro-batches", records.sums["weight"], alone)
