"""Build the flat parameters of a model and the gradient reducer for its ZeRO stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from minidist.comm import Group, Groups
from minidist.config import Config
from minidist.parallel.data.assignment import MIB
from minidist.parallel.data.reducer import find_gradient_group, trainable_parameters
from minidist.parameters import ParamSpec, ParamSpecs, flat_boxes, named_parameters
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import RoundingFunction
from minidist.precision.rounding import global_flat_indices, round_stochastically
from minidist.zero.flat_param import FlatParam, FullGradients, ShardedFlatParam, ShardedGradients
from minidist.zero.gather import Block, BlockGatherer
from minidist.zero.plan import ROOT, FlatLayout, PlannedFlatParam, block_index, lay_out_flat, plan_flat_params
from minidist.zero.reducer import ReducedFlatParam, ZeroReducer


@dataclass
class ZeroReducerBuilder:
    """Moves a model's parameters into flat parameters, sharded over `groups["grads"]`, and builds their reducer.

    model: this rank's part of the model. specs: the specs of its parameters before ZeRO shards them. values: the values
    of these parameters in full precision, before the cast to the parameter dtype. names: the names of all parameters of
    the whole model, the same on every rank. chunk_of: in a pipeline, the index of this rank's model chunk whose
    backward completes a parameter's gradient, by name; empty without a pipeline. reduction_groups: the groups over
    which gradients may be summed: each consists of the ranks that hold the same shard (in stage 0, the same parameter).
    dtypes: of each kind of tensor.
    """

    model: nn.Module
    specs: ParamSpecs
    values: Mapping[str, Tensor]
    names: Sequence[str]
    chunk_of: Mapping[str, int]
    groups: Groups
    reduction_groups: Sequence[Group]
    config: Config
    dtypes: PrecisionDtypes

    def __post_init__(self):
        self.parameters = named_parameters(self.model)
        self.zero = self.config.zero
        world = self.groups.world
        self.offload = self.zero.offload and world.device.type == "cuda"
        if self.zero.stage:
            self.group = self.groups["grads"]
            (spec,) = [spec for spec in self.groups.specs if spec.name == "grads"]
            # Which shard each rank holds.
            self.shard_index = {r: i for ranks in spec.rank_groups(self.groups.mesh) for i, r in enumerate(ranks)}
        else:  # not sharded
            self.group = Group("unsharded", (world.rank,), 0, None, world, self.groups.meter)
            self.shard_index = dict.fromkeys(range(world.size), 0)

    def build(self) -> ZeroReducer:
        """Return the reducer; parameters become views of flat parameters. KeyError if a reduction group is missing."""
        trained = trainable_parameters(self.parameters)
        gatherer = None
        frozen = []
        if self.zero.stage < 3:
            members = [
                self._make_reduced_flat_param(FlatParam, planned.layout) for planned in self._plan_trained(trained)
            ]
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
            self.names,
            master_specs,
            reduces_each_micro_batch=self.zero.shards_gradients,
            gatherer=gatherer,
            reduces_each_block=self.groups.mesh.pp == 1,
        )

    # -- flat parameters -----------------------------------------------------------------------------------------------

    def _plan_trained(self, trained: Mapping[str, Tensor]) -> list[PlannedFlatParam]:
        """Group the trained parameters into flat parameters (`plan_flat_params`)."""
        return plan_flat_params(
            {name: parameter.numel() for name, parameter in trained.items()},
            lambda name: (self._replica_ranks(name), self.chunk_of.get(name, 0)),
            self.zero,
            self.group.size,
            int(self.config.comm.bucket_mib * MIB),
            self.dtypes.reduce.itemsize,
        )

    def _make_blocks(
        self, trained: Mapping[str, Tensor]
    ) -> tuple[list[ReducedFlatParam], list[FlatParam], BlockGatherer]:
        """Make the flat parameters of each block and of the root; frozen parameters have their own."""
        members = []
        frozen = []
        flat_params = {}
        for planned in self._plan_trained(trained):
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
        root = Block(self.model, flat_params.get(ROOT, []), ROOT)
        zero = self.zero
        gatherer = BlockGatherer(self.model, root, blocks, len(layers), zero.keep_last_block, zero.prefetch)
        return members, frozen, gatherer

    def _make_reduced_flat_param(self, kind: type[FlatParam], layout: FlatLayout) -> ReducedFlatParam:
        """Build a trained flat parameter, with its gradients. kind: its class. layout: where its parameters lie."""
        names = list(layout.slots)
        flat_param = self._make_flat_param(kind, layout)
        replicas = self._replica_ranks(names[0])
        replica_group = None
        if len(replicas) > 1:
            spec = replace(self.specs[names[0]], contributors=replicas)
            replica_group = find_gradient_group(spec, self.reduction_groups)
        gradients_type = ShardedGradients if self.zero.shards_gradients else FullGradients
        gradients = gradients_type(
            flat_param.layout, self.group, replica_group, self.dtypes, flat_param.full_buffer.device
        )
        return ReducedFlatParam(flat_param, gradients, self.chunk_of.get(names[0], 0))

    def _make_flat_param(self, kind: type[FlatParam], layout: FlatLayout, frozen: bool = False) -> FlatParam:
        """Build a flat parameter. kind: its class. frozen: whether it has neither masters nor gradients."""
        dtypes = self.dtypes
        if frozen:
            dtypes = PrecisionDtypes(*[dtypes.parameter] * 5)
        parameters = {name: self.parameters[name] for name in layout.slots}
        offload = self.offload and not frozen
        rounding = None if dtypes.master else self._make_rounding(layout)
        return kind(parameters, self.values, layout, self.group, dtypes, offload, rounding)

    def _make_rounding(self, layout: FlatLayout) -> RoundingFunction:
        """Return the rounding, which depends on an element's index in the full parameter and not on the sharding."""
        ranges = layout.param_ranges(self.group.rank)
        specs = self.specs
        seed = self.config.train.seed

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
        return tuple(rank for rank in self.specs[name].contributors if self.shard_index[rank] == own_index)

    def _shard_spec(self, name: str, start: int, stop: int) -> ParamSpec:
        """Return the spec of elements `start` to `stop` of this rank's (tensor-parallel) shard of a parameter."""
        spec = self.specs[name]
        own_index = self.shard_index[self.groups.world.rank]
        (box,) = spec.boxes
        boxes = tuple(inner.shifted(box.start) for inner in flat_boxes(box.shape, start, stop))
        replicas = tuple(rank for rank in spec.replicas if self.shard_index[rank] == own_index)
        return replace(spec, boxes=boxes, replicas=replicas, contributors=self._replica_ranks(name))
