"""A run's layout, as everything here reads it: which part of the model is where, and which samples go through it."""

from dataclasses import dataclass
from functools import cached_property

from minidist import process_groups as roles
from minidist.config import Config
from minidist.data.partition import block, weighted
from minidist.mesh import Mesh
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.schedules import pipeline_schedule
from minidist.precision.policy import BYTES as FORMAT_BYTES
from minidist.precision.policy import TORCH_NAMES, Policy, policy_of
from minidist.validation import validate

# Of an element, by torch's name of its dtype.
BYTES = {TORCH_NAMES[name]: size for name, size in FORMAT_BYTES.items()} | {"int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class Part:
    """Some layers of the model. first: with the embedding before them; last: with norm, head and loss behind them."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class Layout:
    """A configuration on its mesh. schedule: None where there is one stage."""

    config: Config
    mesh: Mesh
    schedule: Schedule | None
    policy: Policy

    @property
    def dtype(self) -> str:
        """Of the parameters and of what is computed, a key of BYTES."""
        return TORCH_NAMES[self.policy.parameter]

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the model, from the input on."""
        model, seq_len = self.config.model, self.config.data.seq_len
        whole = [range(model.num_layers)]
        cuts = roles.stage_parts(model, self.schedule, seq_len) if self.schedule else whole
        return [Part(layers, i == 0, i == len(cuts) - 1) for i, layers in enumerate(cuts)]

    def chunks(self, stage: int) -> list[Part]:
        """The parts that a stage holds, by chunk."""
        if self.schedule is None:
            return self.parts
        return [self.parts[self.schedule.position(stage, chunk)] for chunk in range(self.schedule.chunks)]

    def micro_batches(self, dp: int) -> list[int]:
        """Samples in each micro-batch of the ranks at this place on the dp axis, as the loader cuts them."""
        train, shares = self.config.train, self.config.data.shares
        batch, size = train.global_batch, self.mesh.dp
        mine = block(batch, size, dp) if shares is None else weighted(batch, shares, dp)
        return [block(mine.size, train.micro_batches, i).size for i in range(train.micro_batches)]

    @property
    def sequence(self) -> int:
        """Into how many parts tensor ranks share the sequence between operators: 1 without sequence parallelism."""
        return self.mesh.tp if self.config.parallel.sequence else 1

    @property
    def compute_dtype(self) -> str:
        """The dtype of norms, rotary angles and the loss: at least float32."""
        return self.dtype if BYTES[self.dtype] > 4 else "float32"


def layout_of(config: Config, world_size: int) -> Layout:
    """The layout of a run on so many ranks. Raises UserError, as `minidist train` does, for what cannot run."""
    mesh = validate(config, world_size)
    return Layout(config, mesh, pipeline_schedule(config, mesh), policy_of(config.precision))
