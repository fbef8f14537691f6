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
from minidist.zero.flat_param import FlatParam, FullGradients
from minidist.zero.gather import BlockGatherer


@dataclass
class ReducedFlatParam:
    """A flat parameter and its gradients. chunk: index of this rank's model chunk whose backward completes them."""

    flat_param: FlatParam
    gradients: FullGradients
    chunk: int = 0


class InOrderReductions:
    """Launches the reductions of flat parameters in the same order on every rank, whatever the order of autograd.

    members: the flat parameters, in the order of their reductions. eager: True: launch each reduction as soon as its
    gradients are complete and all earlier reductions have been launched. False: launch reductions only in
    `on_block_done` and `launch_remaining`.
    Attribute awaited: the names of the parameters whose gradients are not complete.
    """

    def __init__(self, members: Sequence[ReducedFlatParam], eager: bool):
        self.members = members
        self.eager = eager
        self._in_flight: deque[FullGradients] = deque()  # those that hold a full-length buffer
        self.reset_for_next_backward()

    def reset_for_next_backward(self) -> None:
        """Expect the gradients of all flat parameters again; the next reduction to launch is the first."""
        self.awaited = {name for member in self.members for name in member.flat_param.parameters}
        self._next = 0

    def mark_ready(self, name: str) -> None:
        """Declare that all gradients of `name` have been added; if eager, launch the reductions now possible."""
        self.awaited.discard(name)
        while (
            self.eager
            and self._not_launched()
            and self.awaited.isdisjoint(self._not_launched()[0].flat_param.parameters)
        ):
            self._launch()

    def on_block_done(self, flat_params: Sequence[FlatParam]) -> None:
        """Launch, in order, all reductions up to those of `flat_params`; called when a block's backward is over."""
        while any(member.flat_param in flat_params for member in self._not_launched()):
            self._launch()

    def launch_remaining(self) -> None:
        """Launch, in order, all reductions that have not been launched since the last reset."""
        while self._not_launched():
            self._launch()

    def _not_launched(self) -> Sequence[ReducedFlatParam]:
        """Return the flat parameters whose reductions have not been launched since the last reset, in order."""
        return self.members[self._next :]

    def _launch(self) -> None:
        """Launch the next reduction. Waits for an older one, so that at most two full-length buffers exist."""
        member = self.members[self._next]
        gradients = self.members[self._next].gradients
        self.awaited -= member.flat_param.parameters.keys()
        self._next += 1
        if not gradients.transient:
            gradients.launch_reduction()
            return
        while len(self._in_flight) > 1:
            self._in_flight.popleft().wait_reduction()
        gradients.launch_reduction()
        if gradients.group.size > 1:
            self._in_flight.append(gradients)
        else:
            gradients.wait_reduction()


class ZeroReducer(GradientReducer):
    """The gradient reducer of ZeRO stages 1 to 3, and of stage 0 in mixed precision or with offloading.

    members: the flat parameters in the order in which backward completes their gradients. frozen: flat parameters
    without gradients. names: the names of all parameters of the whole model, the same on every rank. master_specs: the
    elements of each parameter that this rank's shards hold. gatherer: gathers parameters while the model runs, in stage
    3. reduces_each_micro_batch: whether gradients are reduced in every micro-batch rather than once a step.
    reduces_each_block: whether the reductions of a block start as soon as the gatherer reports that its backward is
    over.
    """

    def __init__(
        self,
        members: Sequence[ReducedFlatParam],
        frozen: Sequence[FlatParam],
        names: Sequence[str],
        master_specs: Mapping[str, ParamSpec],
        *,
        reduces_each_micro_batch: bool,
        gatherer: BlockGatherer | None = None,
        reduces_each_block: bool = False,
    ):
        self.members = members
        self._frozen = frozen
        self._names = names
        self.master_specs = dict(master_specs)
        self.reduces_each_micro_batch = reduces_each_micro_batch
        self.gatherer = gatherer
        self._member_of = {name: member for member in members for name in member.flat_param.parameters}
        chunks = sorted({member.chunk for member in members}) if reduces_each_micro_batch else [None]
        self._orders = {
            chunk: InOrderReductions([m for m in members if chunk in (None, m.chunk)], eager=gatherer is None)
            for chunk in chunks
        }
        self._order_of = {
            name: order for order in self._orders.values() for m in order.members for name in m.flat_param.parameters
        }
        self.masters = {name: master for member in members for name, master in member.flat_param.masters.views.items()}
        self._used: set[str] = set()
        self._unused: set[str] = set()  # parameters that no rank used in the last reduced step
        self._nothing_in_flight = True
        if gatherer is not None and reduces_each_block:
            gatherer.on_block_done = self.on_block_done

    # -- accumulation -------------------------------------------------------------------------------------------------

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name`. Raises RuntimeError after `mark_ready(name)`."""
        if name not in self._order_of[name].awaited:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}), when it may be in flight")
        self._used.add(name)
        self._nothing_in_flight = False
        self._member_of[name].gradients.accumulate(name, grad)

    def mark_ready(self, name: str) -> None:
        """Declare that all gradients of parameter `name` have been accumulated, so that its reduction may start."""
        self._order_of[name].mark_ready(name)

    def on_block_done(self, flat_params: Sequence[FlatParam]) -> None:
        """Launch the reductions of `flat_params`, which belong to a block whose backward is over (stage 3)."""
        for order in self._orders.values():
            order.on_block_done(flat_params)

    def finish_micro_batch(self, chunk: int | None = None) -> None:
        """End a micro-batch's backward: launch its remaining reductions (ZeRO-2 and ZeRO-3) and reshard (ZeRO-3).

        chunk: the index, among this rank's model chunks, of the one whose backward is over; None: of all its chunks.
        """
        if self.reduces_each_micro_batch:
            for completed_chunk, order in self._orders.items():
                if chunk in (None, completed_chunk):
                    order.launch_remaining()
                    order.reset_for_next_backward()
        if self.gatherer is not None:
            self.gatherer.reshard_all()

    # -- the phases of a step -----------------------------------------------------------------------------------------

    def finish_reductions(self) -> None:
        """Collective: launch the remaining reductions; wait until this rank has its shards of the summed gradients."""
        if not self.reduces_each_micro_batch:
            self._orders[None].launch_remaining()
        for member in self.members:
            member.gradients.launch_replica_all_reduce()
        for member in self.members:
            member.gradients.wait_reduction()
        self._nothing_in_flight = True

    @property
    def used_flags(self) -> list[float]:
        """Whether this rank used each parameter of the whole model in the step, as 1.0 or 0.0, for `exclude_unused`."""
        return [float(name in self._used) for name in self._names]

    def exclude_unused(self, use_counts: Sequence[float]) -> None:
        """Exclude the parameters whose use count, the sum of all ranks' `used_flags`, is 0 from this step's update."""
        self._unused = {name for name, count in zip(self._names, use_counts, strict=True) if not count}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return this rank's elements of each reduced gradient, 1-D, by name; None if no rank used the parameter."""
        grads: dict[str, Tensor | None] = {}
        for member in self.members:
            for name, (start, stop) in member.flat_param.param_bounds.items():
                grads[name] = None if name in self._unused else member.gradients.result[start:stop]
        return grads

    def scale_gradients(self, factor: float) -> None:
        """Multiply this rank's shards of the reduced gradients by `factor`."""
        for member in self.members:
            member.gradients.result.mul_(factor)

    def groups_to_update(self) -> list[list[ReducedFlatParam]]:
        """Return the update groups: the flat parameters that one call of the optimizer's `step` updates.

        One group has all flat parameters whose update needs no temporary memory. Each of the others is a group of its
        own; its update needs memory for gradients in the masters' dtype, or for masters not kept between steps.
        """
        combined = []
        separate = []
        for member in self.members:
            temporary = member.flat_param.masters.needs_temporary_memory(member.gradients.result)
            (separate if temporary else combined).append(member)
        return [combined] * bool(combined) + [[member] for member in separate]

    def names_to_update(self, update_group: Sequence[ReducedFlatParam]) -> list[str]:
        """Return the names of the parameters in an update group that any rank has used; the optimizer updates these."""
        return [name for member in update_group for name in member.flat_param.parameters if name not in self._unused]

    def attach_grads(self, update_group: Sequence[ReducedFlatParam]) -> None:
        """Set `.grad` of an update group's masters to their reduced gradients; None for unused parameters."""
        for member in update_group:
            member.flat_param.masters.attach_grads(member.gradients.result, self._unused)

    def copy_to_params(self, update_group: Sequence[ReducedFlatParam], step: int) -> None:
        """Copy an update group's masters to this rank's shards, and drop their gradients. step: from 0."""
        for member in update_group:
            member.flat_param.masters.copy_to_params(step)
            member.flat_param.masters.detach_grads()

    def gather_params(self) -> None:
        """Collective: all-gather the updated shards; does nothing in stage 3, which gathers each block when it runs."""
        if self.gatherer is None:
            for member in self.members:
                member.flat_param.launch_gather()
            for member in self.members:
                member.flat_param.wait_gather()

    def clear_gradients(self) -> None:
        """Drop the gradients of this step; if the step was aborted, replace gradient buffers that may be in flight."""
        for member in self.members:
            if self._nothing_in_flight:
                member.gradients.clear()
            else:
                member.gradients.discard_aborted_step()
        for order in self._orders.values():
            order.reset_for_next_backward()
        self._used = set()
        self._unused = set()
        self._nothing_in_flight = True

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def flat_params(self) -> list[FlatParam]:
        """All flat parameters; those without gradients come last."""
        return [*(member.flat_param for member in self.members), *self._frozen]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter by name, from the masters if they are kept between steps."""
        return {
            name: tensor
            for flat_param in self.flat_params
            for name, tensor in flat_param.masters.checkpoint_tensors().items()
        }

    def after_load(self) -> None:
        """Collective: copy the loaded masters to the shards, and all-gather the parameters."""
        for member in self.members:
            if member.flat_param.masters.persistent:
                member.flat_param.masters.copy_to_params()
        self.gather_params()
