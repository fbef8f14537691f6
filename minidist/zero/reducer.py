"""The sink that shares out what the optimizer works on (ZeRO), and stage 0 with masters of another format.

A step, as `Engine.step` reads it: reduce (every rank gets its shards of the summed gradients, begun inside backward),
update (of its shards), gather (of the parameters, so that every rank has all of them again; in stage 3 not before
somebody needs them). Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5 and 7.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from minidist.parameters import ParamSpec
from minidist.zero.blocks import Blocks
from minidist.zero.flat_param import ShardedUnit, Unit
from minidist.zero.gradients import WholeGradients


@dataclass
class Reduced:
    """A unit and its gradients. chunk: the part of a pipeline's stage whose backward completes them; 0 without one."""

    unit: Unit
    gradients: WholeGradients
    chunk: int = 0


class Round:
    """Units whose reductions are launched in one order, the same on every rank, whatever order autograd chose.

    eager: launch a unit the moment its gradients are complete and those ahead of it are on their way; else only when
    told (`through`, `end`).
    """

    def __init__(self, members: Sequence[Reduced], eager: bool):
        self.members, self.eager = members, eager
        self._rows: deque[WholeGradients] = deque()  # of full length, on their way
        self.start()

    def start(self) -> None:
        """Await the gradients of all units."""
        self.awaited = {name for member in self.members for name in member.unit.parameters}
        self._next = 0

    def ready(self, name: str) -> None:
        """No more will come for a parameter in this round."""
        self.awaited.discard(name)
        while self.eager and self._left() and self.awaited.isdisjoint(self._left()[0].unit.parameters):
            self._launch()

    def through(self, units: Sequence[Unit]) -> None:
        """Launch, with what has come, everything up to the last of these units."""
        while any(member.unit in units for member in self._left()):
            self._launch()

    def end(self) -> None:
        """Launch what is left."""
        while self._left():
            self._launch()

    def _left(self) -> Sequence[Reduced]:
        return self.members[self._next :]

    def _launch(self) -> None:
        member, gradients = self.members[self._next], self.members[self._next].gradients
        self.awaited -= member.unit.parameters.keys()
        self._next += 1
        if not gradients.transient:
            gradients.launch()
            return
        while len(self._rows) > 1:
            self._rows.popleft().settle()
        gradients.launch()
        if gradients.group.size > 1:
            self._rows.append(gradients)
        else:
            gradients.settle()


class ShardedSink:
    """Gradients, masters and parameters of some units. The interfaces are those of `GradSink` and `Updates`.

    members: in the order in which backward completes them. names: of all parameters of the whole model, the same on
    every rank. held: what this rank keeps of each parameter. blocks: what gathers parameters in stage 3.
    each_micro_batch: whether gradients are reduced in every micro-batch, rather than once a step.
    """

    def __init__(
        self,
        members: Sequence[Reduced],
        frozen: Sequence[Unit],
        names: Sequence[str],
        held: Mapping[str, ParamSpec],
        *,
        each_micro_batch: bool,
        blocks: Blocks | None = None,
    ):
        self.members, self._frozen, self._names, self.held = members, frozen, names, dict(held)
        self.each_micro_batch, self.blocks = each_micro_batch, blocks
        self._of = {name: member for member in members for name in member.unit.parameters}
        chunks = sorted({member.chunk for member in members}) if each_micro_batch else [None]
        self._rounds = {
            chunk: Round([m for m in members if chunk in (None, m.chunk)], eager=blocks is None) for chunk in chunks
        }
        self._round_of = {
            name: round for round in self._rounds.values() for m in round.members for name in m.unit.parameters
        }
        self.masters = {name: master for member in members for name, master in member.unit.masters.views.items()}
        self._used: set[str] = set()
        self._unused: set[str] = set()  # by every rank, in the step that was reduced last
        self._whole = True  # whether nothing is on its way

    # -- gradients come in --------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """Add a contribution of this rank. Raises RuntimeError after `ready(name)`."""
        if name not in self._round_of[name].awaited:
            raise RuntimeError(f"a gradient of {name} came after ready({name!r}), when it may be on its way")
        self._used.add(name)
        self._whole = False
        self._of[name].gradients.add(name, grad)

    def ready(self, name: str) -> None:
        """No more will come for `name` before its next reduction."""
        self._round_of[name].ready(name)

    def through(self, units: Sequence[Unit]) -> None:
        """The backward of these units is over."""
        for round in self._rounds.values():
            round.through(units)

    def end(self, chunk: int | None = None) -> None:
        """The backward of a micro-batch is over, in all parts of the model or in one part of a pipeline's stage."""
        if self.each_micro_batch:
            for at, round in self._rounds.items():
                if chunk in (None, at):
                    round.end()
                    round.start()
        if self.blocks is not None:
            self.blocks.end()

    # -- the phases of a step -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End of the step's backward: return when this rank has its shards of the summed gradients."""
        if not self.each_micro_batch:
            self._rounds[None].end()
        for member in self.members:
            member.gradients.begin_finish()
        for member in self.members:
            member.gradients.settle()
        self._whole = True

    @property
    def reports(self) -> list[float]:
        """Which parameters this rank used, to be summed over all ranks: one number for each name."""
        return [float(name in self._used) for name in self._names]

    def settle(self, uses: Sequence[float]) -> None:
        """Take the sum of all ranks' reports: a parameter that nobody used has no gradient."""
        self._unused = {name for name, count in zip(self._names, uses, strict=True) if not count}

    def gradients(self) -> dict[str, Tensor | None]:
        """This rank's shard of each gradient, in one dimension; None where no rank used the parameter."""
        found: dict[str, Tensor | None] = {}
        for member in self.members:
            for name, (start, stop) in member.unit.bounds.items():
                found[name] = None if name in self._unused else member.gradients.result[start:stop]
        return found

    def scale(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        for member in self.members:
            member.gradients.result.mul_(factor)

    def rounds(self, step: int) -> Iterator[None]:
        """What the optimizer steps once for: every master has its gradient while it does. step: the number of it.

        All at once; or one unit after another, where gradients or masters are there only meanwhile.
        """
        together, apart = [], []
        for member in self.members:
            (apart if member.unit.masters.needs_room(member.gradients.result) else together).append(member)
        for members in [together] * bool(together) + [[member] for member in apart]:
            for member in members:
                member.unit.masters.open(member.gradients.result, self._unused)
            yield
            for member in members:
                member.unit.masters.publish(step)
                member.unit.masters.close()

    def gather(self) -> None:
        """Bring all parameters to all ranks; in stage 3 that is left to who needs them."""
        if self.blocks is None:
            for member in self.members:
                member.unit.launch_gather()
            for member in self.members:
                member.unit.wait_gather()

    def clear(self) -> None:
        """Forget the step. One that was broken off leaves what is on its way its memory."""
        for member in self.members:
            if self._whole:
                member.gradients.clear()
            else:
                member.gradients.abandon()
        for round in self._rounds.values():
            round.start()
        self._used, self._unused, self._whole = set(), set(), True

    # -- what is kept -------------------------------------------------------------------------------------------------

    def by_kind(self) -> dict[str, list[Tensor | None]]:
        """What it holds now, by kind, for who measures memory. What is there for a while only is buffers."""
        units, sums = self._units(), [member.gradients.result for member in self.members]
        found: dict[str, list[Tensor | None]] = {"buffers": [], "parameters": [], "gradients": sums, "masters": []}
        for unit in units:
            found["parameters"].append(unit.part)
            if isinstance(unit, ShardedUnit):
                found["buffers"].append(unit.row)
            if unit.masters.separate:
                found["masters" if unit.masters.lasting else "buffers"].append(unit.masters.tensor)
        return found

    def _units(self) -> list[Unit]:
        return [*(member.unit for member in self.members), *self._frozen]

    def stored(self) -> dict[str, Tensor]:
        """What this rank keeps of every parameter of its units, frozen ones too, as exact as it has it."""
        return {name: tensor for unit in self._units() for name, tensor in unit.masters.stored().items()}

    def restored(self) -> None:
        """What `stored` gave was written to: bring it to the parameters of all ranks."""
        for member in self.members:
            if member.unit.masters.lasting:
                member.unit.masters.publish()
        self.gather()
