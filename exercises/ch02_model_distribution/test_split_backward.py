"""Tests of split_backward: schedules written by hand; the reference of both halves is torch's unsplit backward."""

import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from exercises.observations import count_flops
from exercises.pipeline import operation_names
from exercises.testing import Wrong, expect, show, test

TOLERANCE = 1e-12  # sums of less than a hundred terms of about 1, in float64 in another order


def draw(salt, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def make_parameters():
    """The parameters of two linear layers of different shapes and a scale, and one that is never used."""
    values = {"first": draw(1, 6, 4), "scale": draw(2, 6), "second": draw(3, 3, 6), "unused": draw(4, 2)}
    return {name: nn.Parameter(value) for name, value in values.items()}


def run_stage(parameters, x, is_loss=False):
    out = F.linear(F.linear(x, parameters["first"]).tanh() * parameters["scale"], parameters["second"])
    return out.square().sum() if is_loss else out


class MicroBatch:
    """A micro-batch of a stage: its input, output and the output's gradient, and what torch's backward computes.

    scale: a factor of the output's gradient. has_grad: whether the input has a gradient before.
    """

    def __init__(self, parameters, salt, shape=(5, 4), is_loss=False, is_first=False, scale=1.0, has_grad=False):
        self.parameters, self.shape = parameters, shape
        self.before = {name: None if each.grad is None else each.grad.clone() for name, each in parameters.items()}
        x = draw(salt, *shape)
        self.grad = None if is_loss else scale * draw(salt + 1, *shape[:-1], 3)
        self.hidden = None if is_first else x.clone().requires_grad_()
        self.out = run_stage(parameters, x if is_first else self.hidden, is_loss)
        other, x = make_parameters(), x.clone().requires_grad_()
        run_stage(other, x, is_loss).backward(self.grad)
        self.wanted_hidden = x.grad
        if has_grad:
            self.hidden.grad = draw(salt + 2, *shape)
            self.wanted_hidden = x.grad + self.hidden.grad
        self.wanted = {name: each.grad for name, each in other.items() if each.grad is not None}
        self.case = f"hidden states of shape {shape}" + ", the last stage" * is_loss + ", the first stage" * is_first
        self.case += ", whose .grad is there already" * has_grad + ", a gradient of zeros" * (scale == 0)

    def first_half(self, answer):
        answer.backward_of_input(self.out, self.hidden, self.grad)
        self.expect_grads("backward_of_input")

    def second_half(self, answer):
        got = answer.backward_of_weights(self.out, self.parameters, self.grad)
        if not isinstance(got, dict):
            what = "backward_of_weights returns gradients by name"
            raise Wrong("type", what, "a dict", type(got).__name__, self.case)
        expect("the names of the gradients", sorted(got), sorted(self.wanted), case=self.case)
        for name, wanted in self.wanted.items():
            expect(f"the gradient of {name}", got[name], wanted, tolerance=TOLERANCE, case=self.case)
        self.expect_grads("backward_of_weights")

    def expect_grads(self, half):
        """Fail unless the input has its `.grad` after a half, and the parameters have those that they had before."""
        if self.hidden is not None:
            what = f"the gradient of the input after {half}"
            expect(what, self.hidden.grad, self.wanted_hidden, tolerance=TOLERANCE, case=self.case)
        for name, each in self.parameters.items():
            expect(f"the .grad of {name} after {half}", each.grad, self.before[name], case=self.case)


@test(points=4)
def each_w_follows_the_next_b(answer):
    """Each W comes right after the next B, and the last one at the end; the argument does not change."""
    for text, wanted in (
        ("", ""),
        ("F0 F1", "F0 F1"),
        ("F0 B0", "F0 B0 W0"),
        ("F0 F1 B0 B1", "F0 F1 B0 B1 W0 W1"),
        ("F0 F1 B0 F2 B1 B2", "F0 F1 B0 F2 B1 W0 B2 W1 W2"),
        ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3"),
        ("F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"),
        ("F7 F3 B3 B7 F5 B5", "F7 F3 B3 B7 W3 F5 B5 W7 W5"),
        ("F2 F1 F0 B1 B2 B0 F11 F10 B10 B11", "F2 F1 F0 B1 B2 W1 B0 W2 F11 F10 B10 W0 B11 W10 W11"),
    ):
        actions = [(word[0], int(word[1:])) for word in text.split()]
        given = list(actions)
        got = answer.split_backward(given)
        if got is given:
            raise Wrong("wrong", "what split_backward returns", "a new list", "the list that it was given", case=text)
        if type(got) is not list:
            raise Wrong("type", "split_backward returns a list of actions", "a list", type(got).__name__, case=text)
        for action in got:
            if type(action) is not tuple or [type(each) for each in action] != [str, int]:
                raise Wrong("type", "an action is a pair of a kind and a number", '("W", 0)', show(action), case=text)
        expect("the actions", operation_names(got), wanted, case=text or "no action")
        expect("the actions that were given, afterwards", given, actions, case=text or "no action")


@test(points=5)
def both_halves_equal_torchs_backward(answer):
    """The halves compute what one backward computes, for hidden states and for a loss, also on the first stage."""
    for shape in ((1, 4), (5, 4), (2, 3, 4)):
        for is_loss, is_first in ((False, False), (True, False), (False, True), (True, True)):
            micro_batch = MicroBatch(make_parameters(), 10, shape, is_loss, is_first)
            micro_batch.first_half(answer)
            micro_batch.second_half(answer)
    for options in ({"has_grad": True}, {"scale": 0.0}):  # out depends on the parameters also if their gradient is 0
        micro_batch = MicroBatch(make_parameters(), 10, **options)
        micro_batch.first_half(answer)
        micro_batch.second_half(answer)
    for is_loss in (False, True):  # as in a second step without zero_grad
        parameters = make_parameters()
        for salt, each in enumerate(parameters.values()):
            each.grad = draw(50 + salt, *each.shape)
        micro_batch = MicroBatch(parameters, 10, is_loss=is_loss, has_grad=True)
        micro_batch.first_half(answer)
        micro_batch.second_half(answer)


@test(points=3)
def several_micro_batches(answer):
    """The halves of several micro-batches may run in any order."""
    parameters = make_parameters()
    several = [MicroBatch(parameters, 20 + 2 * number, (2, 1 + number, 4)) for number in range(4)]
    for which, half in ((1, "first"), (0, "first"), (0, "second"), (3, "first"), (2, "first"), (3, "second")):
        getattr(several[which], f"{half}_half")(answer)
    for which in (2, 1):
        several[which].second_half(answer)


@test(points=3)
def first_half_computes_the_input_gradient_only(answer):
    """The first half multiplies no matrix for a weight gradient, calls no hook of a parameter and gives it no .grad."""
    for is_first, is_loss in ((False, False), (True, False), (False, True), (True, True)):
        parameters, called = make_parameters(), []
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, called=called: called.append(name))
        with count_flops() as forward:
            run_stage(parameters, draw(9, 5, 4))
        micro_batch = MicroBatch(parameters, 30, is_loss=is_loss, is_first=is_first)
        with count_flops() as first:
            micro_batch.first_half(answer)
        most = 0 if is_first else forward.get_total_flops()
        if first.get_total_flops() > most:
            what = f"floating-point operations of the first half (forward: {forward.get_total_flops()})"
            raise Wrong("wrong", what, f"at most {most}", str(first.get_total_flops()), case=micro_batch.case)
        micro_batch.second_half(answer)
        expect("parameters whose hook was called", called, [], case=micro_batch.case)


@test(points=2)
def second_half_frees_the_graph(answer):
    """After the second half the tensors that forward saved are freed, although the output is still there."""
    for stage, is_loss, is_first in (("a stage between", 0, 0), ("the last stage", 1, 0), ("the first stage", 0, 1)):
        parameters, hidden = make_parameters(), draw(40, 5, 4).requires_grad_(not is_first)
        inside = F.linear(hidden, parameters["first"]).exp()  # exp saves its result
        saved = StorageWeakRef(inside.untyped_storage())
        out, grad = F.linear(inside, parameters["second"]), None if is_loss else draw(41, 5, 3)
        out = out.sum() if is_loss else out
        del inside
        answer.backward_of_input(out, None if is_first else hidden, grad)
        expect("whether the graph is freed after the first half", saved.expired(), False, case=stage)
        gradients = answer.backward_of_weights(out, parameters, grad)
        expect("the names of the gradients", sorted(gradients), ["first", "second"], case=stage)
        if not saved.expired():
            gc.collect()
        expect("whether the graph is freed after the second half", saved.expired(), True, case=stage)
