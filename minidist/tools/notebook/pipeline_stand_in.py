"""A pipeline on live ranks whose stages count time in place of computing (chapter 02b).

The simple trainer's executor really runs the schedule, with all its sends and receives; only the layers are a stand-in.
So who waits for whom is observed, and yet no other program on the machine changes the result.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function

from minidist.comm import GroupSpec, World, bind
from minidist.mesh import Mesh
from minidist.simple import pipeline

Schedule = Callable[[int, int], list[list[pipeline.Action]]]  # (stages, micro-batches) -> the actions of each stage


def make_stage_executor(world: World, schedule: Schedule, num_micro_batches: int) -> pipeline.PipelineExecutor:
    """Collective: return the executor of this rank's stage, of a pipeline over all ranks without split backward."""
    specs = [GroupSpec(name, ("pp",)) for name in ("activations", "gradients")]
    groups = bind(world, Mesh(pp=world.size), specs)
    actions = schedule(world.size, num_micro_batches)[world.rank]
    # The attribute of the module, because a notebook may have replaced the class.
    return pipeline.PipelineExecutor(actions, groups["activations"], groups["gradients"], {}, lambda name, grad: None)


def count_stage_time(
    world: World, schedule: Schedule, num_micro_batches: int, forward_time: int = 1
) -> list[tuple[float, float]]:
    """Collective: run a pipeline whose stages count time; return the begin and the end of each action of this stage.

    A tensor holds the time at which it was sent. An action begins when its tensor has been sent and the previous action
    of the stage has ended; transfers take no time. forward_time: of this stage, per micro-batch, at least 1. A backward
    takes twice as long.
    """
    spans: list[tuple[float, float]] = []
    start = torch.zeros(1, requires_grad=True)

    def run_stage(micro_batch: int, hidden: Tensor | None) -> Tensor:
        return _CountTime.apply(start if hidden is None else hidden, spans, forward_time)

    make_stage_executor(world, schedule, num_micro_batches).run(run_stage, lambda micro_batch: torch.empty(1))
    return spans


class _CountTime(Function):
    """Stands in for a stage's layers: the result, and the gradient of the input, are times."""

    @staticmethod
    def forward(ctx, hidden, spans, forward_time):
        ctx.spans, ctx.backward_time = spans, 2 * forward_time
        return _add_span(spans, hidden, forward_time)

    @staticmethod
    def backward(ctx, grad):
        return _add_span(ctx.spans, grad, ctx.backward_time), None, None


def _add_span(spans: list[tuple[float, float]], received: Tensor, duration: int) -> Tensor:
    """Record an action of this duration; return the time at which its result is sent."""
    # The last stage's backward receives nothing: autograd passes it 1, and its forward ended at 1 or later.
    begin = max(received.item(), spans[-1][1] if spans else 0.0)
    spans.append((begin, begin + duration))
    return torch.full_like(received, begin + duration)
