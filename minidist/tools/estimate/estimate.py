"""What one layout costs each of its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from minidist.config import Config
from minidist.tools.estimate import activations, compute, shards, states
from minidist.tools.estimate.layout import Layout, layout_of
from minidist.tools.estimate.peak import Found, Peak
from minidist.tools.estimate.shared_segments import segment_bytes
from minidist.tools.estimate.traffic import Traffic
from minidist.tools.simulate.timeline import Timeline

# What a rank's tensors are, and what a person calls it.
MEMORY = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "master_bytes": "masters",
    "optimizer_bytes": "states",
    "activation_bytes": "activations",
    "buffer_bytes": "buffers",
}


SEGMENTS = "mapped segments"  # beside them: memory that ranks share to talk


@dataclass(frozen=True)
class RankCost:
    """One rank. samples: of the global batch; flops: of a step, this rank's part, as the model needs them;
    hardware_flops: with what is computed again; wire_bytes: sent in a step, by use; the other bytes are memory.

    peak: bytes of each kind at the moment of a step when all tensors together are most; `memory_bytes` is their sum.
    The fields by kind, named in MEMORY, are the most of each at any time: kinds may be at their most at other moments,
    so their sum may be more. activation_bytes: what is kept for backward, and what waits for the weights' half of one.
    buffer_bytes: all other tensors: gradients of activations, the work of the loss, messages and copies in the format
    of the wire, and in ZeRO the rows of parameters and gradients that are whole for a while. segment_bytes: shared
    memory that ranks talk through, beside the tensors (`segments`). Parameters, masters, states and gradients
    are exact to the byte, and without a pipeline activations are but for the batch (16 bytes a token); with one they
    are from 2 % too few to 12 % too many, the latter where layers are computed again. The peak is within 5 %, buffers
    in it within 10 % (`moments`); their own most within 30 %: it is short where context ranks pass much round, or where
    stages of a pipeline compute again.
    """

    rank: int
    at: dict[str, int]
    samples: int
    flops: int
    hardware_flops: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    segment_bytes: int
    peak: dict[str, int]
    wire_bytes: dict[str, int]

    @property
    def model_state_bytes(self) -> int:
        """What there is before an update: in stages 2 and 3 gradients are there no longer when it is over."""
        return self.parameter_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def memory_bytes(self) -> int:
        """Of all tensors, when they are most."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Estimate:
    """A layout and what it costs. timeline: of the pipeline, None where there is one stage."""

    layout: Layout
    ranks: Sequence[RankCost]
    timeline: Timeline | None


def estimate(config: Config, world_size: int, t_comm: float = 0.0) -> Estimate:
    """What a step of this run costs on so many ranks. Raises UserError for what cannot run.

    t_comm: of a pipeline's transfer, in forwards of the costliest part of the model.
    """
    layout = layout_of(config, world_size)
    traffic = Traffic(layout)
    stages = [_Stage(layout, traffic, stage) for stage in range(layout.mesh.pp)]
    ranks = [_rank(layout, stages, traffic, rank) for rank in range(layout.mesh.world_size)]
    return Estimate(layout, ranks, compute.timeline(layout, t_comm))


class _Stage:
    """What all ranks of a stage have in common."""

    def __init__(self, layout: Layout, traffic: Traffic, stage: int):
        def peak(tensor: int, gradients: int, samples: tuple[int, ...]) -> Found:
            rows = traffic.rows(layout.mesh.rank(pp=stage, tp=tensor))  # the same along dp and cp
            return Peak(layout, stage, rows, gradients, samples).found()

        self.peak = cache(peak)
        self.parameters = sum(weight.numel for weight in states.weights(layout, stage))
        self.activation_bytes = cache(lambda samples: activations.peak(layout, stage, samples))
        self.flops_per_token = compute.flops_per_token(layout, stage)
        self.recomputed_per_token = compute.recomputed_per_token(layout, stage)


def _rank(layout: Layout, stages: Sequence[_Stage], traffic: Traffic, rank: int) -> RankCost:
    mesh, at = layout.mesh, layout.mesh.coords(rank)
    stage, samples = stages[at["pp"]], layout.micro_batches(at["dp"])
    kept = shards.kept(layout, at["pp"], traffic.rows(rank), traffic.place(rank))
    found = stage.peak(at["tp"], kept.gradients, tuple(samples))
    constant = {"parameters": kept.parameters, "masters": kept.masters, "states": kept.moments}
    tokens, sharing = sum(samples) * layout.config.data.seq_len, mesh.cp * mesh.tp
    return RankCost(
        rank=rank,
        at=at,
        samples=sum(samples),
        flops=tokens * stage.flops_per_token // sharing,
        hardware_flops=tokens * (stage.flops_per_token + stage.recomputed_per_token) // sharing,
        parameters=stage.parameters,
        parameter_bytes=kept.parameters,
        gradient_bytes=kept.gradients,
        master_bytes=kept.masters,
        optimizer_bytes=kept.moments,
        activation_bytes=max(stage.activation_bytes(tuple(samples)), found.activations),
        buffer_bytes=found.buffers,
        segment_bytes=segment_bytes(traffic, rank),
        peak={label: (constant | found.peak._asdict())[label] for label in MEMORY.values()},
        wire_bytes=traffic.wire_bytes(rank),
    )
