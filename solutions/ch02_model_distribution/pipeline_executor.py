"""An executor that survives blocking sends: the solution, as it stands in minidist.simple.pipeline.

Autograd ends at the process boundary. A received tensor is a new leaf of this rank's graph, and its `.grad` is what
the previous stage needs to go on. The two halves of the chain rule meet in `backward(gradient)`: the received
gradient stands for everything after this stage. What is sent is detached, because a graph cannot be sent.

In 1F1B messages cross: a stage sends an activation while the next one sends a gradient. If both wait for the end of
their sends, both wait for ever; the backend's buffers only hide it for short messages. Sends that do not block remove
the cycle: a stage then only waits for what an earlier action of its neighbour sends. Megatron-LM batches both
directions instead. Each direction has a group of its own, since NCCL runs the transfers of a group in the order in
which they were started.

A handle keeps its tensor alive. An executor that waits for all handles at the end of the step keeps the outputs of
all micro-batches, and the memory that 1F1B saves is lost.

Usual wrong answers:
* waits for all sends at the end of the step: the outputs of all micro-batches stay in memory
* waits for the end of each send: in 1F1B two neighbours send at the same moment, and neither receives
* inherits from the package's class
* starts every backward from ones
* divides the loss by the number of micro-batches, although each is a part of the mean already
* calls on_backward_done after forwards, too
* forgets a micro-batch after B, although W is still to come
* counts micro-batches as in flight in an evaluation, too
* keeps the handles of sends in training only, so that an evaluation ends before its messages are complete
* sends hidden states as float32, whatever their dtype
* names its neighbours by their ranks among all processes, and not in the group
* keeps the handles of all gradients until the end of the step
* keeps every output and its graph until the end of the step
* keeps micro-batches in flight whose backward is done, so that the next run's count is wrong
* does not let the received hidden states require a gradient
* sends the output as it is, also if it is not contiguous
* waits for the previous send of hidden states before it starts the next: stages that run different schedules deadlock
* waits for each send of hidden states at once
* receives all gradients of one shape in one buffer, which the next B overwrites before W reads it
* sends gradients in the group of the hidden states, where NCCL runs them in the order of the launches
* runs all forwards first, whatever the schedule says
* removes the pair from in_flight, and keeps it in a local variable until the next micro-batch is done
* stores the latest number of micro-batches in flight, not the largest
* counts the peak of each run anew
* calls on_backward_done while the micro-batch is in flight: what looks at memory there still finds its tensors
* never waits for the last sends, so that messages may be incomplete at the end
* passes the gradient of its output on to the previous stage instead of that of its input
* ignores `skip`
* computes everything in B, also if the backward is split
* waits for the oldest send of hidden states in each backward, which is that of the same micro-batch in GPipe and 1F1B
  only
* runs nothing
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
        for kind, i in [action for action in self.actions if action[1] not in skip]:
            if kind == "F":
                self.forward(i, run_stage, empty_hidden)
            elif kind == "B":
                self.backward(i, empty_hidden)
            elif kind == "W":
                self.weight_gradients(i)
            if kind == ("W" if self.is_split else "B"):
                del self.in_flight[i]
                on_backward_done()
        for handle in (*self.activation_sends.values(), *self.gradient_sends):
            handle.wait()
        self.gradient_sends.clear()

    @torch.no_grad()
    def run_forward(self, run_stage: RunStage, empty_hidden: EmptyHidden, num_micro_batches: int) -> None:
        """Collective over the stages: run the forwards of some micro-batches, without gradients; for evaluation."""
        forwards = [("F", i) for i in range(num_micro_batches)]
        replace(self, actions=forwards).run(run_stage, empty_hidden)

    def forward(self, i: int, run_stage: RunStage, empty_hidden: EmptyHidden) -> None:
        """Receive hidden states from the previous stage, run the layers, and send the result to the next stage."""
        hidden = None
        if not self.is_first:
            hidden = empty_hidden(i)
            recv(hidden, self.stage - 1, self.activations)
            hidden.requires_grad_()
        out = run_stage(i, hidden)
        if not self.is_last:
            message = out.detach().contiguous()
            self.activation_sends[i] = send(message, self.stage + 1, self.activations, async_op=True)
        if torch.is_grad_enabled():  # there will be a backward
            self.in_flight[i] = hidden, out
            self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))

    def backward(self, i: int, empty_hidden: EmptyHidden) -> None:
        """Receive the output's gradient from the next stage, run backward, and send the input's to the previous one."""
        hidden, out = self.in_flight[i]
        grad = None  # of the loss: 1
        if not self.is_last:
            grad = empty_hidden(i)
            recv(grad, self.stage + 1, self.gradients)
            self.activation_sends.pop(i).wait()  # it has arrived; the handle holds its memory
        if self.is_split:
            backward_of_input(out, hidden, grad)
            self.output_gradients[i] = grad
        else:
            out.backward(grad)
        if not self.is_first:
            message = hidden.grad.contiguous()
            while self.gradient_sends:
                self.gradient_sends.pop().wait()
            self.gradient_sends.append(send(message, self.stage - 1, self.gradients, async_op=True))

    def weight_gradients(self, i: int) -> None:
        """Second half of a split backward: pass the parameters' gradients of micro-batch `i` to the reducer."""
        _, out = self.in_flight[i]
        for name, gradient in backward_of_weights(out, self.parameters, self.output_gradients.pop(i)).items():
            self.add(name, gradient)
