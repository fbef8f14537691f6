"""The gradient reducer of ZeRO: each rank reduces, updates and stores one shard of every flat parameter.

A step, as `Engine.step` reads it: reduce (every rank receives its shards of the summed gradients; reductions start
inside backward), update (of its shards), gather (of the parameters, so that every rank has all of them again; in stage
3 each block is gathered when the model runs it). Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5 and 7.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from minidist.parallel.data.reducer import GradientReducer
from minidist.parameters import ParamSpec
from minidist.zero.flat_param import FlatParam, FullGradients, ShardedFlatParam
from minidist.zero.gather import BlockGatherer


@dataclass
class ReducedFlatParam:
    """A flat parameter and its gradients. chunk: the chunk of a pipeline's stage whose backward completes them."""

    flat_param: FlatParam
    gradients: FullGradients
    chunk: int = 0


class ReductionOrder:
    """Launches the reductions of flat parameters in one order, the same on every rank, whatever order autograd chose.

    members: in that order. eager: launch a reduction as soon as its gradients have been accumulated and all reductions
    before it have been launched; otherwise only in `on_block_done` and `end`.
    """

    def __init__(self, members: Sequence[ReducedFlatParam], eager: bool):
        self.members, self.eager = members, eager
        self._in_flight: deque[FullGradients] = deque()  # those that hold a full-length buffer
        self.start()

    def start(self) -> None:
        """Await the gradients of all flat parameters."""
        self.awaited = {name for member in self.members for name in member.flat_param.parameters}
        self._next = 0

    def ready(self, name: str) -> None:
        """Declare that all gradients of a parameter have been accumulated."""
        self.awaited.discard(name)
        while self.eager and self._left() and self.awaited.isdisjoint(self._left()[0].flat_param.parameters):
            self._launch()

    def on_block_done(self, flat_params: Sequence[FlatParam]) -> None:
        """Launch all reductions up to the last of these flat parameters."""
        while any(member.flat_param in flat_params for member in self._left()):
            self._launch()

    def end(self) -> None:
        """Launch all reductions that have not been launched."""
        while self._left():
            self._launch()

    def _left(self) -> Sequence[ReducedFlatParam]:
        return self.members[self._next :]

    def _launch(self) -> None:
        member, gradients = self.members[self._next], self.members[self._next].gradients
        self.awaited -= member.flat_param.parameters.keys()
        self._next += 1
        if not gradients.transient:
            gradients.launch()
            return
        while len(self._in_flight) > 1:
            self._in_flight.popleft().wait()
        gradients.launch()
        if gradients.group.size > 1:
            self._in_flight.append(gradients)
        else:
            gradients.wait()


class ZeroReducer(GradientReducer):
    """The gradient reducer of ZeRO, and of stage 0 with masters of another dtype.

    members: the flat parameters in the order in which backward completes their gradients. frozen: flat parameters
    without gradients. names: of all parameters of the whole model, the same on every rank. master_specs: the elements
    of each parameter that this rank's shards hold. gatherer: gathers parameters while the model runs, in stage 3.
    each_micro_batch: whether gradients are reduced in every micro-batch rather than once a step. on_block_done: whether
    the gatherer reports each block whose backward is over, so that its reductions start then.
    """

    def __init__(
        self,
        members: Sequence[ReducedFlatParam],
        frozen: Sequence[FlatParam],
        names: Sequence[str],
        master_specs: Mapping[str, ParamSpec],
        *,
        each_micro_batch: bool,
        gatherer: BlockGatherer | None = None,
        on_block_done: bool = False,
    ):
        self.members, self._frozen, self._names, self.master_specs = members, frozen, names, dict(master_specs)
        self.reduces_each_micro_batch, self.gatherer = each_micro_batch, gatherer
        self._member_of = {name: member for member in members for name in member.flat_param.parameters}
        chunks = sorted({member.chunk for member in members}) if each_micro_batch else [None]
        self._orders = {
            chunk: ReductionOrder([m for m in members if chunk in (None, m.chunk)], eager=gatherer is None)
            for chunk in chunks
        }
        self._order_of = {
            name: order for order in self._orders.values() for m in order.members for name in m.flat_param.parameters
        }
        self.masters = {name: master for member in members for name, master in member.flat_param.masters.views.items()}
        self._used: set[str] = set()
        self._unused: set[str] = set()  # parameters that no rank used in the last reduced step
        self._nothing_in_flight = True
        if gatherer is not None and on_block_done:
            gatherer.on_block_done = self.on_block_done

    # -- accumulation -------------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient. Raises RuntimeError after `ready(name)`."""
        if name not in self._order_of[name].awaited:
            raise RuntimeError(f"a gradient of {name} came after ready({name!r}), when it may be in flight")
        self._used.add(name)
        self._nothing_in_flight = False
        self._member_of[name].gradients.add(name, grad)

    def ready(self, name: str) -> None:
        """Declare that all gradients of `name` before its next reduction have been accumulated."""
        self._order_of[name].ready(name)

    def on_block_done(self, flat_params: Sequence[FlatParam]) -> None:
        """Launch the reductions of a block whose backward is over (stage 3)."""
        for order in self._orders.values():
            order.on_block_done(flat_params)

    def end_backward(self, chunk: int | None = None) -> None:
        """End the backward of a micro-batch through the whole model, or through one chunk of a pipeline's stage."""
        if self.reduces_each_micro_batch:
            for at, order in self._orders.items():
                if chunk in (None, at):
                    order.end()
                    order.start()
        if self.gatherer is not None:
            self.gatherer.end()

    # -- the phases of a step -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the step's backward: return once this rank has its shards of the summed gradients."""
        if not self.reduces_each_micro_batch:
            self._orders[None].end()
        for member in self.members:
            member.gradients.start_finish()
        for member in self.members:
            member.gradients.wait()
        self._nothing_in_flight = True

    @property
    def used_flags(self) -> list[float]:
        """1.0 for each parameter of the whole model that this rank used in the step, else 0.0."""
        return [float(name in self._used) for name in self._names]

    def mark_unused(self, use_counts: Sequence[float]) -> None:
        """Take the sums of all ranks' `used_flags`: a parameter with a count of 0 gets no gradient."""
        self._unused = {name for name, count in zip(self._names, use_counts, strict=True) if not count}

    def gradients(self) -> dict[str, Tensor | None]:
        """This rank's shard of each reduced gradient, (elements,); None for a parameter that no rank used."""
        found: dict[str, Tensor | None] = {}
        for member in self.members:
            for name, (start, stop) in member.flat_param.bounds.items():
                found[name] = None if name in self._unused else member.gradients.result[start:stop]
        return found

    def scale(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        for member in self.members:
            member.gradients.result.mul_(factor)

    def update_groups(self) -> list[list[ReducedFlatParam]]:
        """The flat parameters that the optimizer updates in one call each.

        All in one call, except those whose update needs temporary memory (for gradients in the masters' dtype, or for
        masters that are not kept): these are updated one after another, and share that memory.
        """
        together, apart = [], []
        for member in self.members:
            temporary = member.flat_param.masters.needs_temporary_memory(member.gradients.result)
            (apart if temporary else together).append(member)
        return [together] * bool(together) + [[member] for member in apart]

    def updated_names(self, group: Sequence[ReducedFlatParam]) -> list[str]:
        """The parameters of an update group that some rank used. This rank may hold no element of them."""
        return [name for member in group for name in member.flat_param.parameters if name not in self._unused]

    def attach_grads(self, group: Sequence[ReducedFlatParam]) -> None:
        """Give every master of an update group its gradient, except those of parameters that no rank used."""
        for member in group:
            member.flat_param.masters.attach_grads(member.gradients.result, self._unused)

    def copy_to_params(self, group: Sequence[ReducedFlatParam], step: int) -> None:
        """Copy the updated masters to this rank's shards, and detach their gradients."""
        for member in group:
            member.flat_param.masters.copy_to_params(step)
            member.flat_param.masters.detach_grads()

    def gather(self) -> None:
        """All-gather the updated shards; in stage 3 the model gathers each block when it runs."""
        if self.gatherer is None:
            for member in self.members:
                member.flat_param.launch_gather()
            for member in self.members:
                member.flat_param.wait_gather()

    def clear(self) -> None:
        """Forget the step. After one that was interrupted, buffers in flight keep their memory and get replaced."""
        for member in self.members:
            if self._nothing_in_flight:
                member.gradients.clear()
            else:
                member.gradients.abandon()
        for order in self._orders.values():
            order.start()
        self._used, self._unused, self._nothing_in_flight = set(), set(), True

    # -- memory and checkpoints ---------------------------------------------------------------------------------------

    def tensors_by_kind(self) -> dict[str, list[Tensor | None]]:
        """What this rank holds now, for memory measurements; tensors that live for a part of the step are buffers."""
        sums = [member.gradients.result for member in self.members]
        found: dict[str, list[Tensor | None]] = {"buffers": [], "parameters": [], "gradients": sums, "masters": []}
        for flat_param in self._flat_params():
            found["parameters"].append(flat_param.part)
            if isinstance(flat_param, ShardedFlatParam):
                found["buffers"].append(flat_param.row)
            if flat_param.masters.separate:
                found["masters" if flat_param.masters.lasting else "buffers"].append(flat_param.masters.tensor)
        return found

    def _flat_params(self) -> list[FlatParam]:
        return [*(member.flat_param for member in self.members), *self._frozen]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """This rank's elements of every parameter, frozen ones too, in the widest dtype that it keeps."""
        return {
            name: tensor
            for flat_param in self._flat_params()
            for name, tensor in flat_param.masters.checkpoint_tensors().items()
        }

    def after_load(self) -> None:
        """Copy the loaded `checkpoint_tensors` to the parameters of all ranks."""
        for member in self.members:
            if member.flat_param.masters.lasting:
                member.flat_param.masters.copy_to_params()
        self.gather()
