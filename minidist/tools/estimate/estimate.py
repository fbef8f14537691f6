"""The cost of one training step on every rank of a layout: memory, bytes sent and FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from minidist.config import Config
from minidist.errors import UserError
from minidist.tools.estimate import activations, flops, shards, states
from minidist.tools.estimate.checkpoint_copies import checkpoint_copy_bytes
from minidist.tools.estimate.layout import RunLayout, plan_layout
from minidist.tools.estimate.peak_memory import PeakBytes, StepMemory
from minidist.tools.estimate.shared_memory import shared_segment_bytes
from minidist.tools.estimate.traffic import Traffic
from minidist.tools.simulate.timeline import PipelineTimeline

# The kinds of tensors: the field of `RankCost` that has the kind's own peak -> the kind's name in tables and charts.
MEMORY_KINDS = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "master_bytes": "masters",
    "optimizer_bytes": "states",
    "activation_bytes": "activations",
    "buffer_bytes": "buffers",
}
SHARED_MEMORY = "shared memory"  # the name of the shared-memory segments in tables and charts
CHECKPOINT_COPY = "checkpoint copy"  # the name of the copies for saves in the background


@dataclass(frozen=True)
class RankCost:
    """The modelled cost of a training step on one rank.

    coords: mesh coordinates, by axis. samples: number of samples of the global batch that this rank computes. flops:
    this rank's part of the model FLOPs. hardware_flops: `flops` and the FLOPs of recomputation. local_parameters:
    number of parameter elements on this rank before ZeRO shards them. wire_bytes: bytes sent per step, by the name of
    the group spec (the declaration of process groups for one purpose, such as "tensor"). replica_merge_bytes: by group
    spec, the bytes sent in addition when model replicas are averaged, every `consistency.h` steps.

    Memory, in bytes. The fields named in MEMORY_KINDS are the peak of each kind of tensor. The kinds may peak at
    different times, so the sum of these fields may exceed the peak of all tensors. peak_breakdown: the bytes of each
    kind at the time when all tensors together peak; `peak_memory_bytes` is their sum. activation_bytes: tensors saved
    for backward, or for the weight gradient (W) of a split backward. buffer_bytes: all other tensors: gradients of
    activations, temporaries of the loss, messages, copies in the dtype of the reduction, and ZeRO's gathered parameters
    and unreduced gradients. In addition to the tensors: shared_segment_bytes, the shared-memory segments of the shm
    backend, and checkpoint_copy_bytes, host memory for the copies of saves in the background.

    Accuracy, as tested: parameters, masters, optimizer states, gradients and checkpoint copies are exact to the byte.
    Without a pipeline, activations are exact except for the batch itself (16 bytes per token). With a pipeline they are
    at most 2 % too low and, with recomputation, at most 12 % too high. `peak_memory_bytes` is within 5 %, the buffers
    in `peak_breakdown` are within 10 %. `buffer_bytes` is only within 30 %: too low where context-parallel ranks
    exchange much or pipeline stages recompute.
    """

    rank: int
    coords: dict[str, int]
    samples: int
    flops: int
    hardware_flops: int
    local_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    shared_segment_bytes: int
    checkpoint_copy_bytes: int
    peak_breakdown: dict[str, int]
    wire_bytes: dict[str, int]
    replica_merge_bytes: dict[str, int]

    @property
    def model_state_bytes(self) -> int:
        """Return the bytes of parameters, gradients, master weights and optimizer states just before the update.

        In ZeRO stages 2 and 3 the update frees the gradients.
        """
        return self.parameter_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def peak_memory_bytes(self) -> int:
        """Return the peak bytes of all tensors together: the sum of `peak_breakdown`."""
        return sum(self.peak_breakdown.values())


@dataclass(frozen=True)
class Estimate:
    """The modelled cost of a training step.

    layout: how the run is laid out on its ranks. ranks: the cost on each rank, in rank order. pipeline: the simulated
    timeline of the pipeline schedule, None with a single stage.
    """

    layout: RunLayout
    ranks: Sequence[RankCost]
    pipeline: PipelineTimeline | None


def estimate(config: Config, world_size: int, t_comm: float = 0.0) -> Estimate:
    """Estimate memory, FLOPs and bytes sent of one training step on each of `world_size` ranks, by formulas.

    t_comm: time of a transfer between pipeline stages, as a multiple of the forward of the costliest model chunk.
    Raises UserError for a run that `minidist train` would refuse, and for the simple engine.
    """
    layout = plan_layout(config, world_size)
    if config.engine == "simple":
        raise UserError(
            "engine is simple, which has no estimate: give --engine fast. Parameters, gradients and optimizer states "
            "take as many bytes, up to padding; temporary buffers and some transfers differ."
        )
    traffic = Traffic(layout)
    stages = [_Stage(layout, traffic, stage) for stage in range(layout.mesh.pp)]
    ranks = [_estimate_rank(layout, stages, traffic, rank) for rank in range(layout.mesh.world_size)]
    return Estimate(layout, ranks, flops.simulate_pipeline(layout, t_comm))


class _Stage:
    """The costs that all ranks of a pipeline stage have in common."""

    def __init__(self, layout: RunLayout, traffic: Traffic, stage: int):
        def compute_peak(tensor: int, gradient_bytes: int, samples: tuple[int, ...]) -> PeakBytes:
            flat_params = traffic.flat_params(layout.mesh.rank(pp=stage, tp=tensor))  # the same along dp and cp
            return StepMemory(layout, stage, flat_params, gradient_bytes, samples).compute_peak()

        self.compute_peak = cache(compute_peak)
        self.parameters = sum(parameter.numel for parameter in states.local_parameters(layout, stage))
        self.activation_bytes = cache(lambda samples: activations.peak_activation_bytes(layout, stage, samples))
        self.flops_per_token = flops.stage_flops_per_token(layout, stage)
        self.hardware_flops_per_token = self.flops_per_token + flops.stage_recompute_flops(layout, stage)


def _estimate_rank(layout: RunLayout, stages: Sequence[_Stage], traffic: Traffic, rank: int) -> RankCost:
    """Estimate the cost of a step on one rank. stages: the costs of each pipeline stage."""
    mesh, coords = layout.mesh, layout.mesh.coords(rank)
    stage, samples = stages[coords["pp"]], tuple(layout.micro_batch_sizes(coords["dp"]))
    model_states = shards.local_model_states(layout, coords["pp"], traffic.flat_params(rank), traffic.shard_index(rank))
    peak = stage.compute_peak(coords["tp"], model_states.gradients, samples)
    constant = {
        "parameters": model_states.parameters,
        "masters": model_states.masters,
        "states": model_states.moments,
    }
    tokens, ranks_per_sample = sum(samples) * layout.config.data.seq_len, mesh.cp * mesh.tp
    return RankCost(
        rank=rank,
        coords=coords,
        samples=sum(samples),
        flops=tokens * stage.flops_per_token // ranks_per_sample,
        hardware_flops=tokens * stage.hardware_flops_per_token // ranks_per_sample,
        local_parameters=stage.parameters,
        parameter_bytes=model_states.parameters,
        gradient_bytes=model_states.gradients,
        master_bytes=model_states.masters,
        optimizer_bytes=model_states.moments,
        activation_bytes=max(stage.activation_bytes(samples), peak.activations),
        buffer_bytes=peak.buffers,
        shared_segment_bytes=shared_segment_bytes(traffic, rank),
        checkpoint_copy_bytes=checkpoint_copy_bytes(layout, traffic, rank),
        peak_breakdown={kind: (constant | peak.at_peak._asdict())[kind] for kind in MEMORY_KINDS.values()},
        wire_bytes=traffic.wire_bytes(rank),
        replica_merge_bytes=traffic.replica_merge_bytes(rank),
    )
