"""What one layout costs each of its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from minidist.config import Config
from minidist.parallel.pipeline.simulate import Timeline
from minidist.plan import activations, compute, shards, states
from minidist.plan.layout import Layout, layout_of
from minidist.plan.traffic import Traffic

# What a rank's memory is the sum of, and what a person calls it.
MEMORY = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "master_bytes": "masters",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
}


@dataclass(frozen=True)
class RankCost:
    """One rank. samples: of the global batch; flops: of a step, this rank's part, as the model needs them;
    hardware_flops: with what is computed again; wire_bytes: sent in a step, by use; the other bytes are memory.
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
    wire_bytes: dict[str, int]

    @property
    def model_state_bytes(self) -> int:
        """What stays from step to step."""
        return self.parameter_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def memory_bytes(self) -> int:
        return sum(getattr(self, name) for name in MEMORY)


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
    stages = [_Stage(layout, stage) for stage in range(layout.mesh.pp)]
    traffic = Traffic(layout)
    ranks = [_rank(layout, stages, traffic, rank) for rank in range(layout.mesh.world_size)]
    return Estimate(layout, ranks, compute.timeline(layout, t_comm))


class _Stage:
    """What all ranks of a stage have in common."""

    def __init__(self, layout: Layout, stage: int):
        self.parameters = sum(weight.numel for weight in states.weights(layout, stage))
        self.activation_bytes = cache(lambda samples: activations.peak(layout, stage, samples))
        self.flops_per_token = compute.flops_per_token(layout, stage)
        self.recomputed_per_token = compute.recomputed_per_token(layout, stage)


def _rank(layout: Layout, stages: Sequence[_Stage], traffic: Traffic, rank: int) -> RankCost:
    mesh, at = layout.mesh, layout.mesh.coords(rank)
    stage, samples = stages[at["pp"]], layout.micro_batches(at["dp"])
    kept = shards.kept(layout, at["pp"], traffic.rows(rank), traffic.place(rank))
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
        activation_bytes=stage.activation_bytes(tuple(samples)),
        wire_bytes=traffic.wire_bytes(rank),
    )
