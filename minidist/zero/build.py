"""Build the flat parameters of a model and the gradient reducer for its ZeRO stage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from minidist.comm import Group, Groups
from minidist.config import Config
from minidist.parallel.data.assignment import MIB
from minidist.parallel.data.reducer import trainable
from minidist.parameters import Box, ParamSpec, ParamSpecs, flat_boxes, named_parameters
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import Rounding
from minidist.precision.rounding import global_flat_indices, round_stochastically
from minidist.zero.flat_param import FlatParam, FullGradients, ShardedFlatParam, ShardedGradients
from minidist.zero.gather import Block, BlockGatherer
from minidist.zero.plan import ROOT, Layout, PlannedFlatParam, block_of, lay_out_flat, plan_flat_params
from minidist.zero.reducer import ReducedFlatParam, ZeroReducer


@dataclass(frozen=True)
class ModelFacts:
    """The parameters of this rank's part of the model, by global name.

    specs: of the parameters as forward and backward see them. values: in full precision, before conversion to their
    dtype. names: all parameters of the whole model, the same on every rank. chunk_of: in a pipeline, the chunk of this
    stage whose backward completes a gradient. seed: of stochastic rounding.
    """

    specs: ParamSpecs
    values: Mapping[str, Tensor]
    names: Sequence[str]
    chunk_of: Mapping[str, int]
    seed: int = 0


def make_zero_reducer(
    model: nn.Module,
    given: ModelFacts,
    groups: Groups,
    reducing: Iterable[Group],
    config: Config,
    formats: PrecisionDtypes,
) -> ZeroReducer:
    """Lay the model's parameters into flat parameters, sharded over `groups["grads"]`; return their gradient reducer.

    reducing: the groups whose ranks hold the same shard (in stage 0, the same parameter) and sum its gradients.
    Raises KeyError if none of them spans the replicas of a shard.
    """
    return _Builder(model, given, groups, list(reducing), config, formats).reducer()


class _Builder:
    def __init__(self, model, given, groups, reducing, config, formats):
        self.model, self.given, self.groups, self.reducing = model, given, groups, reducing
        self.config, self.formats, self.zero = config, formats, config.zero
        self.parameters = named_parameters(model)
        self.host = config.zero.offload and groups.world.device.type == "cuda"
        rank = groups.world.rank
        if self.zero.stage:
            self.group = groups["grads"]
            (use,) = [use for use in groups.uses if use.name == "grads"]
            self.place = {r: i for ranks in use.rank_groups(groups.mesh) for i, r in enumerate(ranks)}
        else:  # not sharded
            self.group = Group("alone", (rank,), 0, None, groups.world, groups.meter)
            self.place = dict.fromkeys(range(groups.world.size), 0)

    def reducer(self) -> ZeroReducer:
        trained = trainable(self.parameters)
        gatherer, frozen = None, []
        if self.zero.stage < 3:
            members = [self._member(FlatParam, planned.layout) for planned in self._plan(trained)]
        else:
            members, frozen, gatherer = self._blocks(trained)
        held = {
            name: self._held(name, *bounds)
            for flat_param in [*(member.flat_param for member in members), *frozen]
            for name, bounds in flat_param.layout.held(self.group.rank).items()
        }
        return ZeroReducer(
            members,
            frozen,
            self.given.names,
            held,
            each_micro_batch=self.zero.shares_gradients,
            gatherer=gatherer,
            on_block_done=self.groups.mesh.pp == 1,
        )

    # -- flat parameters -----------------------------------------------------------------------------------------------

    def _plan(self, trained: Mapping[str, Tensor]) -> list[PlannedFlatParam]:
        return plan_flat_params(
            {name: parameter.numel() for name, parameter in trained.items()},
            lambda name: (self._copies(name), self.given.chunk_of.get(name, 0)),
            self.zero,
            self.group.size,
            int(self.config.comm.bucket_mib * MIB),
            self.formats.reduce.itemsize,
        )

    def _blocks(self, trained: Mapping[str, Tensor]) -> tuple[list[ReducedFlatParam], list[FlatParam], BlockGatherer]:
        """Make the flat parameters of each block and of the rest; frozen parameters have their own."""
        members, frozen, flat_params = [], [], {}
        for planned in self._plan(trained):
            members.append(self._member(ShardedFlatParam, planned.layout))
            flat_params.setdefault(planned.block, []).append(members[-1].flat_param)
        still: dict[int, list[str]] = {}
        for name in self.parameters.keys() - trained.keys():
            still.setdefault(block_of(name), []).append(name)
        for block in sorted(still, reverse=True):
            names = [name for name in self.parameters if name in still[block]]
            layout = lay_out_flat({name: self.parameters[name].numel() for name in names}, self.group.size)
            frozen.append(self._unit(ShardedFlatParam, layout, frozen=True))
            flat_params.setdefault(block, []).append(frozen[-1])
        layers = self.model.model.layers
        blocks = [Block(layers[i], flat_params[i], i) for i in flat_params if i != ROOT]
        root, keep = Block(self.model, flat_params.get(ROOT, []), ROOT), self.zero.keep_last_block
        return members, frozen, BlockGatherer(self.model, root, blocks, len(layers), keep, self.zero.prefetch)

    def _member(self, kind: type[FlatParam], layout: Layout) -> ReducedFlatParam:
        names = list(layout.slots)
        flat_param, copies = self._unit(kind, layout), self._copies(names[0])
        outer = None if len(copies) == 1 else next((g for g in self.reducing if g.ranks == copies), None)
        if outer is None and len(copies) > 1:
            raise KeyError(f"no group was bound over ranks {copies}, which hold the same shard of {names[0]}")
        make = ShardedGradients if self.zero.shares_gradients else FullGradients
        gradients = make(flat_param.layout, self.group, outer, self.formats, flat_param.row.device)
        return ReducedFlatParam(flat_param, gradients, self.given.chunk_of.get(names[0], 0))

    def _unit(self, kind: type[FlatParam], layout: Layout, frozen: bool = False) -> FlatParam:
        formats = self.formats
        if frozen:
            formats = PrecisionDtypes(*[formats.parameter] * 5)
        parameters = {name: self.parameters[name] for name in layout.slots}
        host, rounding = self.host and not frozen, None if formats.master else self._rounding(layout)
        return kind(parameters, self.given.values, layout, self.group, formats, host, rounding)

    def _rounding(self, layout: Layout) -> Rounding:
        """Seed the rounding of an element by its index in the full parameter, whatever the sharding."""
        bounds, specs, seed = layout.held(self.group.rank), self.given.specs, self.given.seed

        def round_one(values: Tensor, into: Tensor, step: int, name: str) -> None:
            index = bounds[name][0]
            if specs[name].boxes[0].shape != specs[name].shape:  # tensor-parallel
                index = global_flat_indices(specs[name].shape, self._held(name, *bounds[name]).boxes, values.device)
            round_stochastically(values, into, seed, step, name, index)

        return round_one

    # -- replicas and shards -------------------------------------------------------------------------------------------

    def _copies(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the same shard of a parameter and whose local gradients are summed with this rank's."""
        here = self.place[self.groups.world.rank]
        return tuple(rank for rank in self.given.specs[name].contributors if self.place[rank] == here)

    def _held(self, name: str, start: int, stop: int) -> ParamSpec:
        """The spec of elements `start` to `stop` of this rank's (tensor-parallel) part of a parameter."""
        spec, here = self.given.specs[name], self.place[self.groups.world.rank]
        (box,) = spec.boxes
        boxes = tuple(_moved(part, box.start) for part in flat_boxes(box.shape, start, stop))
        replicas = tuple(rank for rank in spec.replicas if self.place[rank] == here)
        return replace(spec, boxes=boxes, replicas=replicas, contributors=self._copies(name))


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(*(tuple(a + b for a, b in zip(ends, by, strict=True)) for ends in (box.start, box.stop)))
