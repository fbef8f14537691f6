"""The other side of a gradient sink: what the optimizer updates, and how that comes back to the model.

In plain data parallelism there is little to it: every replica updates all of its parameters, where they are. A sink
that shares out the work (`zero`), or keeps masters in another format (`precision`), has more to say here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from minidist.spec import Specs


class Updates(Protocol):
    """What a step needs of a sink when gradients are reduced.

    each_micro_batch: whether gradients are reduced in every micro-batch, so that each is `ready` in every one.
    blocks: what gathers parameters while the model runs, None where they are all there.
    masters: what the optimizer updates, by name. held: which elements of a parameter its master has.
    """

    each_micro_batch: bool
    blocks: object | None
    masters: Mapping[str, Tensor]
    held: Specs

    def end(self, chunk: int | None = None) -> None:
        """The backward of a micro-batch is over: in the whole model, or in one chunk of a pipeline's stage."""

    def gradients(self) -> dict[str, Tensor | None]:
        """The reduced gradient of each master; None where no rank used the parameter."""

    @property
    def reports(self) -> list[float]:
        """What is to be summed over all ranks and given to `settle`, after `finish`."""

    def settle(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' reports."""

    def updates(self, step: int) -> Iterator[None]:
        """The optimizer steps once for each, with the masters that have a `.grad` then. step: its number."""

    def gather(self) -> None:
        """Bring updated masters to the parameters of all ranks."""

    def stored(self) -> dict[str, Tensor]:
        """What this rank keeps, for `held`: what a checkpoint reads, and writes before `restored`."""

    def restored(self) -> None:
        """What `stored` gave has new content."""


def trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that take a gradient. Frozen parameters are nobody's business here."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


class WholeSink:
    """What a sink is to the optimizer when every replica updates all of its parameters, where they are."""

    each_micro_batch, blocks = False, None
    reports: Sequence[float] = ()

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: Specs):
        self._parameters = self.masters = trainable(parameters)
        self.held = {name: specs[name] for name in self.masters}

    def end(self, chunk: int | None = None) -> None:
        """Gradients stay until the end of the step."""

    def gradients(self) -> dict[str, Tensor | None]:
        """Those of the parameters."""
        return {name: parameter.grad for name, parameter in self.masters.items()}

    def settle(self, sums: Sequence[float]) -> None:
        """`finish` knows already which parameters were used."""

    def updates(self, step: int) -> Iterator[None]:
        """All at once: every `.grad` is in its place."""
        yield

    def gather(self) -> None:
        """Every rank has made the same update."""

    def stored(self) -> dict[str, Tensor]:
        """The parameters."""
        return {name: parameter.detach() for name, parameter in self.masters.items()}

    def restored(self) -> None:
        """They are the model's own."""
