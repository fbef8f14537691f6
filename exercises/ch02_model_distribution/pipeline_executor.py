"""An executor that survives blocking sends.

Write the executor of a pipeline: it runs the actions of this rank's stage, whatever the schedule, and moves hidden
states to the next stage and their gradients to the previous one. A blocking send returns only when the other stage has
posted its receive, and no two stages may wait for each other.

You write three methods. forward(i, ...) runs action ("F", i), and backward(i, ...) runs ("B", i). `run` runs all
actions except those of the micro-batches in `skip`, then waits for the sends that are left. weight_gradients(i) is
given: it runs ("W", i) of a split backward (2.11).
run_stage(i, hidden) runs the stage's layers. hidden: the previous stage's output, (b_i, s, h), or None on stage 0.
Returns the stage's output, (b_i, s, h), or on the last stage the micro-batch's part of the loss, (). b_i may differ
between micro-batches: empty_hidden(i) returns a new tensor (b_i, s, h) to receive hidden states or their gradient in.
self.activations and self.gradients are groups of all stages, in order: send hidden states in the first, and their
gradients in the second. Gradients of parameters are added to `.grad`, in every run. If self.is_split, B calls
backward_of_input(out, hidden, grad) in place of out.backward(grad), and stores grad in self.output_gradients[i].
A micro-batch is in flight from its F to the end of its B, or of its W if the backward is split. Meanwhile
self.in_flight[i] is the pair (hidden, out). Then `run` deletes the pair, and only after that calls on_backward_done():
your code, its local variables included, has no reference to the two tensors any more. self.peak_in_flight is the
largest number of pairs so far, in all runs. Under torch.no_grad() nothing is in flight.
Example: 2 stages with the weights w0 = 2 and w1 = 3, micro-batches x = 1 and x = 10; stage 0 returns w0 * x, stage 1
    returns w1 * hidden as the loss. Stage 0 runs F0 F1 B0 B1: it sends 2.0 and 20.0, and receives 3.0 twice. In the end
    w0.grad = 3 * 1 + 3 * 10 = 33 and w1.grad = 2 + 20 = 22. Divide nothing: each loss is a part of the mean already.

Checked, on 1 to 4 ranks: gradients against one process in float64, for GPipe, 1F1B, another order and a split backward,
with outputs that are not contiguous, with skipped micro-batches and in a second run; the order of actions and calls of
on_backward_done; peak_in_flight; one message per micro-batch and neighbour, in its group and in the dtype of the hidden
states; that no stage waits for ever; that tensors are freed: when on_backward_done() is called, nothing references the
pair, and you have waited for the sends of hidden states of all finished micro-batches, and for all sends of gradients
except the last; at the end of `run` for all sends; run_forward, which evaluates; and any floating dtype, on 1 to 7
ranks.

You may call:
    send(tensor, stage, group, async_op=True)   starts to send a contiguous tensor; returns a handle
    handle.wait()   blocks until the tensor has been sent; until then the handle keeps its memory
    recv(tensor, stage, group)   blocks, and overwrites the tensor with what that stage sends
    backward_of_input(out, hidden, grad)   the first half of a split backward; None as hidden: does nothing
    Tensor.backward(grad), Tensor.detach(), Tensor.requires_grad_(), Tensor.contiguous(), torch.is_grad_enabled()

Check it with: python -m exercises check pipeline_executor

Stub e3deffbd.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, recv, send
from minidist.simple.pipeline import Action, EmptyHidden, RunStage, backward_of_input, backward_of_weights


@dataclass(eq=False)
class PipelineExecutor:
    """Runs this stage's actions, and moves hidden states to the next stage and their gradients to the previous one.

    It cannot deadlock: sends are asynchronous, so a stage only ever waits for what an earlier action of a neighbour
    sends, or receives from this one. Each direction has a process group of its own, in which transfers are in the order
    of the micro-batches.

    actions: of this stage. activations, gradients: groups of all stages, in order, for hidden states and for their
    gradients. parameters: of this stage, by name. add: called with the name and the gradient of a parameter by a split
    backward, whose gradients do not pass through hooks. peak_in_flight: the largest number of micro-batches in flight.
    """

    actions: list[Action]
    activations: Group
    gradients: Group
    parameters: dict[str, nn.Parameter]
    add: Callable[[str, Tensor], None]
    peak_in_flight: int = 0

    def __post_init__(self) -> None:
        self.stage = self.activations.rank
        self.is_first, self.is_last = self.stage == 0, self.stage == self.activations.size - 1
        self.is_split = any(kind == "W" for kind, _ in self.actions)
        self.in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}  # by micro-batch: hidden states received, output
        self.output_gradients: dict[int, Tensor | None] = {}  # by micro-batch, between B and W
        self.activation_sends: dict[int, Handle] = {}  # by micro-batch
        self.gradient_sends: list[Handle] = []  # the last one

    def run(
        self,
        run_stage: RunStage,
        empty_hidden: EmptyHidden,
        skip: Set[int] = frozenset(),
        on_backward_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Collective over the stages: run all actions, except those of the micro-batches in `skip`.

        run_stage: runs this stage's layers on a micro-batch, whose number it gets with the previous stage's hidden
        states (None on the first stage), and returns hidden states, on the last stage the micro-batch's part of the
        loss. empty_hidden: allocates a tensor for the hidden states of a micro-batch. skip: the same on all stages.
        on_backward_done: called when this stage has done a micro-batch's backward, and holds none of its tensors.
        """
        raise NotImplementedError("run all actions but the skipped ones, and wait for the sends that are left")

    @torch.no_grad()
    def run_forward(self, run_stage: RunStage, empty_hidden: EmptyHidden, num_micro_batches: int) -> None:
        """Collective over the stages: run the forwards of some micro-batches, without gradients; for evaluation."""
        forwards = [("F", i) for i in range(num_micro_batches)]
        replace(self, actions=forwards).run(run_stage, empty_hidden)

    def forward(self, i: int, run_stage: RunStage, empty_hidden: EmptyHidden) -> None:
        """Receive hidden states from the previous stage, run the layers, and send the result to the next stage."""
        raise NotImplementedError("run ('F', i): receive, run the stage, send; keep what backward needs")

    def backward(self, i: int, empty_hidden: EmptyHidden) -> None:
        """Receive the output's gradient from the next stage, run backward, and send the input's to the previous one."""
        raise NotImplementedError("run ('B', i): receive the gradient, run backward, send the gradient of the input")

    def weight_gradients(self, i: int) -> None:
        """Second half of a split backward: pass the parameters' gradients of micro-batch `i` to the reducer."""
        _, out = self.in_flight[i]
        for name, gradient in backward_of_weights(out, self.parameters, self.output_gradients.pop(i)).items():
            self.add(name, gradient)
