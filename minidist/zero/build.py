"""Build the flat parameters of a model and the gradient reducer for its ZeRO stage."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from minidist.comm import Group, Groups
from minidist.config import Config
from minidist.parallel.data.assignment import MIB
from minidist.parallel.data.reducer import trainable_parameters
from minidist.parameters import Box, ParamSpec, ParamSpecs, flat_boxes, named_parameters
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import Rounding
from minidist.precision.rounding import global_flat_indices, round_stochastically
from minidist.zero.flat_param import FlatParam, FullGradients, ShardedFlatParam, ShardedGradients
from minidist.zero.gather import Block, BlockGatherer
from minidist.zero.plan import ROOT, FlatLayout, PlannedFlatParam, block_index, lay_out_flat, plan_flat_params
from minidist.zero.reducer import ReducedFlatParam, ZeroReducer


@dataclass(frozen=True)
class ModelParams:
    """What the ZeRO reducer must know of the parameters of this rank's part of the model; all by global name.

    specs: of the parameters before ZeRO shards them. values: in full precision, before the cast to the parameter dtype.
    names: of all parameters of the whole model, the same on every rank. chunk_of: in a pipeline, the chunk of this
    stage whose backward completes a parameter's gradient; empty without a pipeline. seed: of stochastic rounding.
    """

    specs: ParamSpecs
    values: Mapping[str, Tensor]
    names: Sequence[str]
    chunk_of: Mapping[str, int]
    seed: int = 0


def make_zero_reducer(
    model: nn.Module,
    params: ModelParams,
    groups: Groups,
    reduction_groups: Iterable[Group],
    config: Config,
    dtypes: PrecisionDtypes,
) -> ZeroReducer:
    """Lay the model's parameters into flat parameters, sharded over `groups["grads"]`; return their gradient reducer.

    reduction_groups: the groups over which gradients may be summed: each consists of the ranks that hold the same shard
    (in stage 0, the same parameter). Raises KeyError if a shard's replicas are none of these groups.
    """
    return _Builder(model, params, groups, list(reduction_groups), config, dtypes).reducer()


class _Builder:
    def __init__(self, model, params, groups, reduction_groups, config, dtypes):
        self.model, self.params, self.groups, self.reduction_groups = model, params, groups, reduction_groups
        self.config, self.dtypes, self.zero = config, dtypes, config.zero
        self.parameters = named_parameters(model)
        self.offload = config.zero.offload and groups.world.device.type == "cuda"
        rank = groups.world.rank
        # shard_index: which shard each rank holds
        if self.zero.stage:
            self.group = groups["grads"]
            (spec,) = [spec for spec in groups.specs if spec.name == "grads"]
            self.shard_index = {r: i for ranks in spec.rank_groups(groups.mesh) for i, r in enumerate(ranks)}
        else:  # not sharded
            self.group = Group("unsharded", (rank,), 0, None, groups.world, groups.meter)
            self.shard_index = dict.fromkeys(range(groups.world.size), 0)

    def reducer(self) -> ZeroReducer:
        trained = trainable_parameters(self.parameters)
        gatherer, frozen = None, []
        if self.zero.stage < 3:
            members = [self._make_reduced_flat_param(FlatParam, planned.layout) for planned in self._plan(trained)]
        else:
            members, frozen, gatherer = self._make_blocks(trained)
        master_specs = {
            name: self._shard_spec(name, *ends)
            for flat_param in [*(member.flat_param for member in members), *frozen]
            for name, ends in flat_param.layout.param_ranges(self.group.rank).items()
        }
        return ZeroReducer(
            members,
            frozen,
            self.params.names,
            master_specs,
            reduces_each_micro_batch=self.zero.shards_gradients,
            gatherer=gatherer,
            reduces_each_block=self.groups.mesh.pp == 1,
        )

    # -- flat parameters -----------------------------------------------------------------------------------------------

    def _plan(self, trained: Mapping[str, Tensor]) -> list[PlannedFlatParam]:
        return plan_flat_params(
            {name: parameter.numel() for name, parameter in trained.items()},
            lambda name: (self._replica_ranks(name), self.params.chunk_of.get(name, 0)),
            self.zero,
            self.group.size,
            int(self.config.comm.bucket_mib * MIB),
            self.dtypes.reduce.itemsize,
        )

    def _make_blocks(
        self, trained: Mapping[str, Tensor]
    ) -> tuple[list[ReducedFlatParam], list[FlatParam], BlockGatherer]:
        """Make the flat parameters of each block and of the root; frozen parameters have their own."""
        members, frozen, flat_params = [], [], {}
        for planned in self._plan(trained):
            members.append(self._make_reduced_flat_param(ShardedFlatParam, planned.layout))
            flat_params.setdefault(planned.block, []).append(members[-1].flat_param)
        frozen_names: dict[int, list[str]] = {}
        for name in self.parameters.keys() - trained.keys():
            frozen_names.setdefault(block_index(name), []).append(name)
        for block in sorted(frozen_names, reverse=True):
            names = [name for name in self.parameters if name in frozen_names[block]]
            layout = lay_out_flat({name: self.parameters[name].numel() for name in names}, self.group.size)
            frozen.append(self._make_flat_param(ShardedFlatParam, layout, frozen=True))
            flat_params.setdefault(block, []).append(frozen[-1])
        layers = self.model.model.layers
        blocks = [Block(layers[i], flat_params[i], i) for i in flat_params if i != ROOT]
        root, zero = Block(self.model, flat_params.get(ROOT, []), ROOT), self.zero
        gatherer = BlockGatherer(self.model, root, blocks, len(layers), zero.keep_last_block, zero.prefetch)
        return members, frozen, gatherer

    def _make_reduced_flat_param(self, kind: type[FlatParam], layout: FlatLayout) -> ReducedFlatParam:
        names = list(layout.slots)
        flat_param, replicas = self._make_flat_param(kind, layout), self._replica_ranks(names[0])
        replica_group = (
            None if len(replicas) == 1 else next((g for g in self.reduction_groups if g.ranks == replicas), None)
        )
        if replica_group is None and len(replicas) > 1:
            raise KeyError(f"no group was bound over ranks {replicas}, which hold the same shard of {names[0]}")
        gradients_type = ShardedGradients if self.zero.shards_gradients else FullGradients
        gradients = gradients_type(
            flat_param.layout, self.group, replica_group, self.dtypes, flat_param.full_buffer.device
        )
        return ReducedFlatParam(flat_param, gradients, self.params.chunk_of.get(names[0], 0))

    def _make_flat_param(self, kind: type[FlatParam], layout: FlatLayout, frozen: bool = False) -> FlatParam:
        dtypes = self.dtypes
        if frozen:
            dtypes = PrecisionDtypes(*[dtypes.parameter] * 5)
        parameters = {name: self.parameters[name] for name in layout.slots}
        offload, rounding = self.offload and not frozen, None if dtypes.master else self._make_rounding(layout)
        return kind(parameters, self.params.values, layout, self.group, dtypes, offload, rounding)

    def _make_rounding(self, layout: FlatLayout) -> Rounding:
        """Return the rounding, which depends on an element's index in the full parameter and not on the sharding."""
        ranges, specs, seed = layout.param_ranges(self.group.rank), self.params.specs, self.params.seed

        def round_parameter(values: Tensor, into: Tensor, step: int, name: str) -> None:
            index = ranges[name][0]
            if specs[name].boxes[0].shape != specs[name].shape:  # tensor-parallel
                index = global_flat_indices(
                    specs[name].shape, self._shard_spec(name, *ranges[name]).boxes, values.device
                )
            round_stochastically(values, into, seed, step, name, index)

        return round_parameter

    # -- replicas and shards -------------------------------------------------------------------------------------------

    def _replica_ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks that hold this rank's shard of a parameter and sum its gradients."""
        own_index = self.shard_index[self.groups.world.rank]
        return tuple(rank for rank in self.params.specs[name].contributors if self.shard_index[rank] == own_index)

    def _shard_spec(self, name: str, start: int, stop: int) -> ParamSpec:
        """Return the spec of elements `start` to `stop` of this rank's (tensor-parallel) shard of a parameter."""
        spec, own_index = self.params.specs[name], self.shard_index[self.groups.world.rank]
        (box,) = spec.boxes
        boxes = tuple(_shifted(inner, box.start) for inner in flat_boxes(box.shape, start, stop))
        replicas = tuple(rank for rank in spec.replicas if self.shard_index[rank] == own_index)
        return replace(spec, boxes=boxes, replicas=replicas, contributors=self._replica_ranks(name))


def _shifted(box: Box, offset: tuple[int, ...]) -> Box:
    return Box(*(tuple(a + b for a, b in zip(ends, offset, strict=True)) for ends in (box.start, box.stop)))
