"""What the optimizer updates once gradients are reduced, and how that comes back to the model.

In plain data parallelism there is little to it: every replica updates all of its parameters, where they are. Where
ranks share out the work (`zero`), or keep masters in another format (`precision`), there is more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from minidist.parallel.data.reducer import trainable
from minidist.parameters import Specs


class Updates(Protocol):
    """What a step works with when gradients are reduced.

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

    def rounds(self, step: int) -> Iterator[None]:
        """The optimizer steps once for each, with the masters that have a `.grad` then. step: its number."""

    def gather(self) -> None:
        """Bring updated masters to the parameters of all ranks."""

    def stored(self) -> dict[str, Tensor]:
        """What this rank keeps, for `held`: what a checkpoint reads, and writes before `restored`."""

    def restored(self) -> None:
        """What `stored` gave has new content."""


class InPlace:
    """Every replica updates all of its parameters, where they are."""

    each_micro_batch, blocks = False, None
    reports: Sequence[float] = ()

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: Specs):
        self.masters = trainable(parameters)
        self.held = {name: specs[name] for name in self.masters}

    def end(self, chunk: int | None = None) -> None:
        """Gradients stay until the end of the step."""

    def gradients(self) -> dict[str, Tensor | None]:
        """Those of the parameters."""
        return {name: parameter.grad for name, parameter in self.masters.items()}

    def settle(self, sums: Sequence[float]) -> None:
        """The sink knows already which parameters were used: the others have no gradient."""

    def rounds(self, step: int) -> Iterator[None]:
        """All at once: every `.grad` is in its place."""
        yield

    def gather(self) -> None:
        """Every rank has made the same update."""

    def stored(self) -> dict[str, Tensor]:
        """The parameters."""
        return {name: parameter.detach() for name, parameter in self.masters.items()}

    def restored(self) -> None:
        """They are the model's own."""
