"""Apply all parallelisms to a plain model: returns the model that this rank trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm import Groups
from minidist.compile import compile_layers
from minidist.config import Config
from minidist.consistency.asynchronous import AsynchronousReducer
from minidist.consistency.central import ParameterServerReducer
from minidist.consistency.merge import ReplicaMerger
from minidist.parallel.context.split import apply_context_parallel
from minidist.parallel.data.reducer import GradientReducer
from minidist.parallel.data.replicate import broadcast_model, make_reducer
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.executor import PipelineExecutor
from minidist.parallel.pipeline.schedules import pipeline_schedule
from minidist.parallel.pipeline.split import EMBEDDING, keep_stage_modules
from minidist.parallel.tensor.split import ParamShard, apply_tensor_parallel
from minidist.parameters import Box, ParamSpec, check_specs_match_parameters, named_parameters
from minidist.precision.dtypes import cast_parameters
from minidist.precision.policy import Policy, resolve_policy
from minidist.precision.scaler import LossScaler
from minidist.process_groups import (
    DEFAULT_GROUP_SPECS,
    GRADIENT_GROUPS,
    assign_layers,
    first_and_last_stages,
    group_specs,
    ranks_with,
    replica_dp_coords,
)
from minidist.recompute import apply_recomputation
from minidist.zero.build import ZeroReducerBuilder

__all__ = [
    "DEFAULT_GROUP_SPECS",
    "ParallelModel",
    "assign_layers",
    "group_specs",
    "parallelize",
]


@dataclass(frozen=True)
class ParallelModel:
    """A parallelized model, as one rank sees it.

    model: this rank's modules. specs: the specs of its parameters, by name. reducer: accumulates and reduces gradients,
    and holds the masters that the optimizer updates. pipeline: the executor of this rank's stage; None if pp is 1.
    parts: the range of layers of each model chunk of the whole pipeline, from the input on. cp_attention: "ring" or
    "ulysses", the attention over sequences that are sharded over cp. sequence_parallel: whether tp ranks shard the
    sequence between tensor-parallel regions. scaler: the loss scaler; None without loss scaling. merger: averages
    replicas that train separately; None if all ranks train together.
    """

    model: nn.Module
    specs: dict[str, ParamSpec]
    reducer: GradientReducer
    pipeline: PipelineExecutor | None = None
    parts: Sequence[range] = ()
    cp_attention: str = "ring"
    sequence_parallel: bool = False
    scaler: LossScaler | None = None
    merger: ReplicaMerger | None = None

    def layer_range(self, chunk: int) -> range:
        """Return the layer indices of one chunk of this rank's pipeline stage. chunk: its number on the stage."""
        return self.parts[self.pipeline.schedule.position(self.pipeline.stage, chunk)]

    def empty_hidden(self, samples: int, seq_len: int, tp: int) -> Tensor:
        """Allocate a tensor for hidden states received from another stage, (samples, local length, hidden size).

        seq_len: tokens of a sequence on this rank. With sequence parallelism the local length is seq_len / tp.
        """
        like = next(self.model.parameters())
        seq_len = seq_len // tp if self.sequence_parallel else seq_len
        return torch.empty(samples, seq_len, self.model.config.hidden_size, dtype=like.dtype, device=like.device)


def parallelize(model: nn.Module, groups: Groups, config: Config) -> ParallelModel:
    """Collective: parallelize `model` over the mesh of `groups`; return this rank's part of it.

    In this order: pipeline, tensor and context parallelism, compilation, recomputation, precision, data parallelism or
    ZeRO. model: the full model, changed in place; rank 0's values are broadcast. groups: bound from `group_specs`.
    """
    mesh = groups.mesh
    for name in (
        "outer",
        "grads",
        "shard_replicas",
        "tensor",
        "activations",
    ):  # one after the other: all values are rank 0's
        if name in groups:
            broadcast_model(model, groups[name])
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    stages = dict.fromkeys(shapes, (mesh.coords(groups.world.rank)["pp"],))
    schedule = pipeline_schedule(config, mesh)
    parts = []
    used_by = {}
    if schedule is not None:
        parts = assign_layers(config.model, schedule, config.data.seq_len)
        used_by = keep_stage_modules(model, schedule, groups["activations"].rank, parts)
        if config.model.tie_embeddings and EMBEDDING in used_by:
            stages[EMBEDDING] = first_and_last_stages(schedule)
    held = {name: ParamShard(Box.whole(shapes[name]), (0,)) for name in named_parameters(model)}
    if mesh.tp > 1:
        held = apply_tensor_parallel(model, groups["tensor"], config.parallel.sequence)
    if mesh.cp > 1:
        apply_context_parallel(model, groups["context"], config.parallel.context)
    if config.compile:
        compile_layers(model)
    apply_recomputation(model, config.recompute)  # around the compiled layers, which it runs again
    specs = {}
    together = replica_dp_coords(mesh, config, groups.world.rank)
    tp_rank = mesh.coords(groups.world.rank)["tp"]
    for name, shard in held.items():
        replicas = ranks_with(mesh, stages[name], together, shard.holders)
        contributors = replicas if shard.partial else ranks_with(mesh, stages[name], together, (tp_rank,))
        specs[name] = ParamSpec(name, shapes[name], (shard.box,), replicas, contributors)
    check_specs_match_parameters(model, specs)
    policy = resolve_policy(config.precision)
    chunk_of = {} if schedule is None else _completing_chunks(schedule, groups["activations"].rank, used_by)
    reducer = _make_gradient_reducer(model, specs, groups, config, policy, tuple(shapes), chunk_of)
    pipeline = None
    if schedule is not None:
        shared = [name for name in held if len(stages[name]) > 1]
        between = groups["activations"], groups["gradients"]
        pipeline = PipelineExecutor(schedule, between, reducer, named_parameters(model), used_by, shared)
    sequence = config.parallel.sequence and mesh.tp > 1
    scaler = LossScaler(config.precision) if policy.scaled else None
    merger = ReplicaMerger(config, reducer, groups) if config.consistency.merges_replicas else None
    return ParallelModel(model, specs, reducer, pipeline, parts, config.parallel.context, sequence, scaler, merger)


def _completing_chunks(schedule: Schedule, stage: int, used_by: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return, by parameter name, the chunk of `stage` whose backward completes the parameter's gradient.

    used_by: the chunks of the stage that use each parameter; the earliest in the pipeline is the last in backward.
    """
    return {
        name: min(chunks, key=lambda chunk: schedule.position(stage, chunk))
        for name, chunks in used_by.items()
        if chunks
    }


def _make_gradient_reducer(
    model: nn.Module,
    specs: dict[str, ParamSpec],
    groups: Groups,
    config: Config,
    policy: Policy,
    names: Sequence[str],
    chunk_of: Mapping[str, int],
) -> GradientReducer:
    """Cast the model's parameters to their dtype, and build the gradient reducer of the configuration.

    names: the names of the full model's parameters. chunk_of: for each parameter, the chunk of this rank's stage whose
    backward completes its gradient; empty without a pipeline.
    """
    dtypes, values = cast_parameters(model, policy)
    reduction_groups = [groups[name] for name in GRADIENT_GROUPS if name in groups]
    if config.zero.stage == 0 and policy.uniform and not config.zero.offload:
        parameters = named_parameters(model)
        comm = config.comm
        if config.consistency.mode == "central":
            return ParameterServerReducer(parameters, specs, groups["grads"], config.consistency.server)
        if config.consistency.is_asynchronous:
            return AsynchronousReducer(parameters, specs, groups, config)
        return make_reducer(comm.gradients, parameters, specs, reduction_groups, comm.bucket_mib)
    return ZeroReducerBuilder(model, specs, values, names, chunk_of, groups, reduction_groups, config, dtypes).build()
