"""The layout of a run: the layers of each pipeline stage and the samples of each micro-batch."""

from dataclasses import dataclass
from functools import cached_property

from minidist.config import Config
from minidist.data.partition import block_partition, weighted_partition
from minidist.mesh import Mesh
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.schedules import pipeline_schedule
from minidist.precision.policy import PRECISION_BYTES, TORCH_NAMES, Policy, resolve_policy
from minidist.process_groups import assign_layers
from minidist.tools.config_warnings import validate_options

# Bytes per element, by torch's name of the dtype.
DTYPE_BYTES = {TORCH_NAMES[name]: size for name, size in PRECISION_BYTES.items()} | {"int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class ModelChunk:
    """Consecutive layers of the model that run as one chunk of a pipeline stage; the whole model without a pipeline.

    layers: the numbers of the layers in the model. has_embedding: the chunk begins with the embedding. has_head: the
    chunk ends with the final norm, the head and the loss.
    """

    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class RunLayout:
    """How a run is laid out on its ranks.

    schedule: the pipeline schedule, None with a single stage. policy: the dtype of each kind of tensor.
    """

    config: Config
    mesh: Mesh
    schedule: Schedule | None
    policy: Policy

    @property
    def dtype(self) -> str:
        """The dtype of parameters and activations, a key of DTYPE_BYTES."""
        return TORCH_NAMES[self.policy.parameter]

    @property
    def compute_dtype(self) -> str:
        """The dtype of norms, rotary embeddings and the loss: at least float32."""
        return self.dtype if DTYPE_BYTES[self.dtype] > 4 else "float32"

    @property
    def replica_mesh(self) -> Mesh:
        """The mesh of the ranks that reduce gradients in every step: all ranks, or those of one replica (local SGD,
        DiLoCo, gossip)."""
        return self.config.replica_mesh(self.mesh)

    @cached_property
    def model_chunks(self) -> list[ModelChunk]:
        """All chunks of the model, in the order in which forward runs them."""
        model, seq_len = self.config.model, self.config.data.seq_len
        ranges = assign_layers(model, self.schedule, seq_len) if self.schedule else [range(model.num_layers)]
        return [ModelChunk(layers, i == 0, i == len(ranges) - 1) for i, layers in enumerate(ranges)]

    def stage_chunks(self, stage: int) -> list[ModelChunk]:
        """Return the model chunks of pipeline stage `stage`, by chunk number."""
        if self.schedule is None:
            return self.model_chunks
        return [self.model_chunks[self.schedule.position(stage, chunk)] for chunk in range(self.schedule.num_chunks)]

    def micro_batch_sizes(self, dp_rank: int) -> list[int]:
        """Return the number of samples in each micro-batch of a step, on the ranks with dp coordinate `dp_rank`."""
        train, shares = self.config.train, self.config.data.shares
        batch, size = train.global_batch, self.mesh.dp
        local = block_partition(batch, size, dp_rank) if shares is None else weighted_partition(batch, shares, dp_rank)
        return [block_partition(local.size, train.micro_batches, i).size for i in range(train.micro_batches)]

    @property
    def largest_micro_batch_size(self) -> int:
        """The number of samples in the largest micro-batch of any rank."""
        return max(self.micro_batch_sizes(dp)[0] for dp in range(self.mesh.dp))

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that shard the sequence outside of tensor-parallel regions: tp, or 1 if none do."""
        return self.mesh.tp if self.config.parallel.sequence else 1


def plan_layout(config: Config, world_size: int) -> RunLayout:
    """Return the mesh, pipeline schedule and dtypes of a run on `world_size` ranks.

    Raises UserError for a run that `minidist train` would refuse.
    """
    mesh = validate_options(config, world_size)
    return RunLayout(config, mesh, pipeline_schedule(config, mesh), resolve_policy(config.precision))
