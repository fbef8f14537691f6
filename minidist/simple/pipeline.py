"""Pipeline parallelism: each rank (stage) has some consecutive layers, and micro-batches pass through the stages.

A schedule is data: for every stage a list of actions ("F", i), ("B", i) or ("W", i): forward, backward, or the weight
half of a split backward of micro-batch i. GPipe (Huang et al. 2019, arXiv 1811.06965) runs all forwards first. 1F1B
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2) runs each backward as early as possible: a stage has at most as
many micro-batches in flight as there are stages from it to the last, however many micro-batches a step has. One
executor runs every schedule.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce, recv, send

Action = tuple[str, int]  # ("F", "B" or "W", micro-batch)
RunStage = Callable[[int, Tensor | None], Tensor]  # (micro-batch, hidden states) -> hidden states or loss
EmptyHidden = Callable[[int], Tensor]  # micro-batch -> a tensor for its hidden states


def gpipe(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order: all forwards, then all backwards."""
    return [[(kind, i) for kind in "FB" for i in range(num_micro_batches)] for _ in range(num_stages)]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order; stage p of n has at most n - p micro-batches in flight."""
    schedule: list[list[Action]] = [[] for _ in range(num_stages)]
    for stage, actions in enumerate(schedule):
        # The first gradient comes back after its micro-batch has passed all later stages.
        warm_up = min(num_stages - 1 - stage, num_micro_batches)
        for i in range(num_micro_batches + warm_up):
            if i < num_micro_batches:
                actions.append(("F", i))
            if i >= warm_up:
                actions.append(("B", i - warm_up))
    return schedule


def split_backward(actions: list[Action]) -> list[Action]:
    """Split each backward: ("B", i) computes the gradient that the previous stage waits for, ("W", i) those of weights.

    Each W follows the next B, so that the previous stage gets its gradient before this one computes anything else.
    """
    result, waiting = [], []
    for kind, i in actions:
        result.append((kind, i))
        if kind == "B":
            result += waiting
            waiting = [("W", i)]
    return result + waiting


def backward_of_input(out: Tensor, hidden: Tensor | None, grad: Tensor | None) -> None:
    """Compute the gradient of a stage's input only, into `hidden.grad`, and keep the graph for the weight gradients.

    out: the stage's output. hidden: its input; None on the first stage, where nothing is computed. grad: the gradient
    of `out`; None if `out` is the loss.
    """
    if hidden is not None:
        out.backward(grad, inputs=[hidden], retain_graph=True)


def backward_of_weights(out: Tensor, parameters: dict[str, nn.Parameter], grad: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of the parameters that `out` depends on; no `.grad` changes.

    Autograd repeats the computation of the input gradient for it; a zero-bubble engine (arXiv 2401.10241) does not.
    """
    found = torch.autograd.grad(out, list(parameters.values()), grad, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Return the layers of a stage; the numbers of layers differ by at most one, and the last stages have fewer."""
    size, longer = divmod(num_layers, num_stages)
    start = stage * size + min(stage, longer)
    return range(start, start + size + (stage < longer))


def keep_stage_modules(model: nn.Module, layers: range) -> None:
    """Replace the modules of a Transformer that other stages hold by `nn.Identity`; the others keep their names.

    The stage of layer 0 has the embedding, that of the last layer the final norm and the head. If the head's weight is
    the embedding's, both of these stages keep a replica, whose gradients `TiedGradient` sums.
    """
    decoder, config = model.model, model.config
    is_last = layers.stop == config.num_layers
    for index in range(config.num_layers):
        if index not in layers:
            decoder.layers[index] = nn.Identity()
    if layers.start > 0 and not (is_last and config.tie_embeddings):
        decoder.embed_tokens = nn.Identity()
    if not is_last:
        decoder.norm = model.lm_head = nn.Identity()


class TiedGradient:
    """Sums the gradient of an embedding that the first and the last stage share, before the reducer gets it.

    name: of the parameter. group: both stages' ranks. add: the gradient reducer's `add`, which gets all other gradients
    immediately, and this one in `finish`: until then it is a partial sum.
    """

    def __init__(self, name: str, parameter: nn.Parameter, group: Group, add: Callable[[str, Tensor], None]):
        self.name, self.group, self.add_to_reducer = name, group, add
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.total = torch.zeros_like(parameter, dtype=wide, requires_grad=False)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a micro-batch's gradient of the shared embedding to its sum; pass any other on to the reducer."""
        if name == self.name:
            self.total += gradient
        else:
            self.add_to_reducer(name, gradient)

    def finish(self) -> None:
        """Collective: after the last backward of a step, sum the embedding's gradient over both stages."""
        all_reduce(self.total, self.group)
        self.add_to_reducer(self.name, self.total)
        self.total = torch.zeros_like(self.total)


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
