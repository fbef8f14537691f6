"""A parity case: a layout and a value for each switch (an option such as the optimizer); its model, data and config."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from minidist.config import (
    CheckpointConfig,
    CommConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    MeshConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from minidist.data.loader import Batch, Loader
from minidist.data.synthetic import generate_text
from minidist.labels import IGNORE_INDEX
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.tools.parity.layouts import Layout
from minidist.tools.parity.probe import EdgeCaseTransformer

STEPS = 5
GLOBAL_BATCH = 29  # a prime: no number of ranks or micro-batches divides it
TEXT_LENGTH = 4000
SEED = 11
CLIPPED_STEP = 1  # in cases with clipping, the only step whose gradient norm exceeds the limit
EMPTY_STEP = 2  # in cases with an empty step, this step has no counted token
RESUME_AFTER = 3
SHORT_SAMPLES = (
    13  # with padding, the first samples of each global batch, so that equal partitions have unequal token counts
)

# Synchronization modes that must equal synchronous training, with the options under which they do. All but central do
# so with plain SGD only: the mean of N updates is the update by the mean gradient, and their sum that by the sum.
MODES = {
    "central": ConsistencyConfig(mode="central"),
    "local": ConsistencyConfig(mode="local", h=1),
    "diloco": ConsistencyConfig(mode="diloco", h=1, outer_lr=1.0, outer_momentum=0.0),
    "gossip": ConsistencyConfig(mode="gossip", h=1),  # on up to three replicas, which are all neighbours
    "stale": ConsistencyConfig(mode="stale", staleness_bound=0),
    "asynchronous": ConsistencyConfig(mode="asynchronous"),  # on one rank
}
# In these a rank has the gradients and the loss of its own samples: only the parameters are those of one process.
WITH_OWN_GRADIENTS = tuple(mode for mode in MODES if mode != "central")

# All-reduces of the simple engine, by how a row names them: "ring" is a kind of attention.
ALGORITHMS = {f"all-reduce={algorithm}": algorithm for algorithm in ("tree", "ring", "doubling")}

# How gradients are reduced, the all-reduce algorithm, the ZeRO configuration, or the synchronization mode.
GRADIENTS = {
    "bucketed": {},
    "naive": {},
    **{algorithm: {} for algorithm in ALGORITHMS},
    **{mode: {} for mode in MODES},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2-whole": {"stage": 2, "keep_gradients": True},
    "zero3": {"stage": 3},
    "zero3-freed": {"stage": 3, "keep_last_block": False, "prefetch": False},
    "zero1-hybrid": {"stage": 1},
    "zero3-hybrid": {"stage": 3},
}

# The switches of a case besides its layout. The first value of each is its default.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float64", "float32", "bf16", "fp16"),
    "optimizer": ("adamw", "sgd", "muon"),
    "gradients": tuple(GRADIENTS),
    "micro_batches": (1, 4),  # or twice as many as there are stages, if those are more than 2
    "tied": (True, False),
    "padding": (False, True),
    "clip": (False, True),
    "dropout": (0.0, 0.1),
    "start": ("equal", "different"),
    "shares": ("equal", "uneven"),
    "empty_step": (False, True),
    "resume": (False, True),
    "recompute": ("none", "block", "selective"),
    "engine": ("fast", "simple"),
}

# float64: summing in another order moves parameters by 1e-12 of the largest in five AdamW steps; 1e-10 leaves room.
# float32: 1 eps = 1.2e-7; a loss or norm is one sum of some hundred terms (16 eps), a gradient the sum of products over
# layers (84 eps). Under AdamW a tiny gradient whose sign is in its last bits moves its parameter by a whole learning
# rate, and Muon makes a tiny singular value 480 times larger, so there parameters are reported, and have no tolerance.
# 16 bits, against float32: every hidden state and weight is off by up to half an eps (bf16 2**-8, fp16 2**-11) of its
# own size, at random. A gradient adds up such products over layers, and that of the last step is taken at parameters
# that SGD has led 1 eps apart by then: 16 eps were seen under data parallelism, 29 in a ring, whose attention is by
# itself as exact as the whole one (40). In a norm over all gradients most of it cancels (4 eps); the loss is a mean
# over hundreds of tokens (half an eps).
_EPS = {"bf16": 2**-8, "fp16": 2**-11}
_FULL = {
    "float64": {"loss": 1e-10, "grad": 1e-10, "grad_norm": 1e-10, "param": 1e-10},
    "float32": {"loss": 2e-6, "grad": 1e-5, "grad_norm": 2e-6, "param": 1e-5},
}
_HALF = {dtype: {"loss": eps / 2, "grad": 40 * eps, "grad_norm": 4 * eps} for dtype, eps in _EPS.items()}
TOLERANCES = {
    (dtype, optimizer): tolerances
    if dtype == "float64" or optimizer == "sgd"
    else {kind: value for kind, value in tolerances.items() if kind != "param"}
    for dtype, tolerances in {**_FULL, **_HALF}.items()
    for optimizer in ("adamw", "sgd", "muon")
}

# The 16-bit cases have parameters and activations in 16 bits; their reference has both in float32.
POLICIES = {"float64": "fp64", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Case:
    """One configuration of the parity test: a layout and a value for each switch (an option such as the optimizer).

    ranks: the sizes of the model are multiples of this number. layers: the number of layers of the model. Cases with
    equal ranks and layers have the same model, and may share a reference run. The fields after `mesh_layout` are the
    switches; SWITCHES lists their possible values. gradients: how gradients are reduced, the all-reduce algorithm, the
    ZeRO stage, or the synchronization mode; in those of WITH_OWN_GRADIENTS the optimizer is SGD alone, with a constant
    rate. tied: whether embedding and head are tied. padding, clip, empty_step: see `adjust_labels`. start: whether all
    ranks start with equal parameters. shares: whether the data-parallel ranks have equal shares of the batch. resume:
    whether the run is stopped before step RESUME_AFTER and resumed from a checkpoint.
    """

    ranks: int
    layers: int
    mesh_layout: Layout
    dtype: str
    optimizer: str
    gradients: str
    micro_batches: int
    tied: bool
    padding: bool
    clip: bool
    dropout: float
    start: str
    shares: str
    empty_step: bool
    resume: bool
    recompute: str
    engine: str

    @property
    def world_size(self) -> int:
        """The number of ranks on which the case runs."""
        return self.mesh_layout.mesh.world_size

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches per step.

        It is the field `micro_batches`; if that is above 1, it is at least twice the number of pipeline stages.
        """
        return 1 if self.micro_batches == 1 else max(self.micro_batches, 2 * self.mesh_layout.pp)

    @property
    def description(self) -> str:
        """The layout and one word for each switch that does not have its default value, as text."""
        words = [str(self.mesh_layout), self.gradients]
        if self.num_micro_batches > 1:
            words.append(f"micro-batches={self.num_micro_batches}")
        words.append("tied" if self.tied else "untied")
        words += [name for name in ("padding", "clip", "empty_step", "resume") if getattr(self, name)]
        if self.dropout:
            words.append(f"dropout={self.dropout}")
        words += [f"{getattr(self, name)}-{name}" for name in ("start", "shares") if getattr(self, name) != "equal"]
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        words += [f"engine={self.engine}"] if self.engine != "fast" else []
        return " ".join(words).replace("_", "-")

    @property
    def name(self) -> str:
        """The description, dtype and optimizer as text: the name that `--only` matches."""
        return f"{self.description} {self.dtype} {self.optimizer}"

    @property
    def reference_case(self) -> "Case":
        """The case with which this case is compared: the same model and batches in one process.

        Switches that make no difference in one process have their default value, so several cases share a reference
        case.
        """
        defaults = {
            "gradients": "local" if self.has_own_gradients else "bucketed",  # the same optimizer
            "micro_batches": 1,
            "start": "equal",
            "shares": "equal",
            "resume": False,
            "recompute": "none",
            "engine": "fast",
        }
        dtype = "float32" if self.dtype in HALF else self.dtype
        return dataclasses.replace(self, mesh_layout=Layout(), dtype=dtype, **defaults)

    @property
    def has_own_gradients(self) -> bool:
        """Whether each rank has the gradients and the loss of its own samples, so that only parameters are compared."""
        return self.gradients in WITH_OWN_GRADIENTS

    @property
    def tolerance(self) -> dict[str, float]:
        """The tolerated relative difference from the reference, by kind of value (`compare.KINDS`).

        A kind without an entry is reported only.
        """
        tolerances = TOLERANCES[self.dtype, self.optimizer]
        return {"param": tolerances["param"]} if self.has_own_gradients else tolerances

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, which decreases from step to step as under a learning-rate schedule.

        With SGD it is smaller for deeper models: at 0.1 the rounding errors of 16 layers grew fiftyfold in five steps.
        """
        first = 0.2 / self.layers if self.optimizer == "sgd" else 1e-3
        # A server follows its own schedule.
        return first if self.has_own_gradients else first / (1 + 0.2 * step)

    def make_model(self, seed: int = SEED) -> EdgeCaseTransformer:
        """Make the model with initial parameters drawn from `seed`, in float64 if that is the case's dtype, else in
        float32."""
        model = EdgeCaseTransformer(self.model_config)
        init_parameters(model, seed)
        return model.to(torch.float64 if self.dtype == "float64" else torch.float32)

    @property
    def model_config(self) -> ModelConfig:
        """The sizes of the model: multiples of `ranks`, so that every layout of `ranks` ranks can run it.

        It has fewer key-value heads than some layouts have tensor-parallel ranks.
        """
        heads = math.lcm(4, self.ranks)
        return ModelConfig(
            vocab_size=_round_up(128, self.ranks),
            hidden_size=4 * heads,
            intermediate_size=_round_up(40, self.ranks),
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=2 if heads & (heads - 1) == 0 else 1,  # two cannot be divided over three ranks
            tie_embeddings=self.tied,
            dropout=self.dropout,
            init_std=0.1,
        )

    @property
    def seq_len(self) -> int:
        """Tokens per sample: a multiple of 2 * `ranks`, so that every layout can divide a sample evenly.

        Ring attention divides a sample into two chunks per rank.
        """
        return _round_up(12, 2 * self.ranks)

    def config(self, clip_norm: float | None = None) -> Config:
        """Make the configuration with which the trainer runs the case.

        clip_norm: the gradient norm to clip to, chosen by the reference run; None for no clipping.
        """
        # Every step overrides the learning rate. Adam's usual eps of 1e-8 is below the rounding of a float32 gradient:
        # elements that should be zero would move by whole learning rates, and later gradients would show it.
        optim = OptimConfig(kind=self.optimizer, lr=1.0, weight_decay=0.1, momentum=0.5, eps=1e-5, clip_norm=clip_norm)
        if self.has_own_gradients:
            plain = {"weight_decay": 0.0, "momentum": 0.0, "schedule": "constant", "warmup_steps": 0}
            optim = dataclasses.replace(optim, lr=self.lr(0), **plain)
        layout = self.mesh_layout
        parallel = {"schedule": layout.schedule, "sequence": layout.sequence, "context": layout.context}
        ranks = layout.dp * layout.cp
        shard = ranks // 2 if self.gradients.endswith("hybrid") else None
        algorithm = ALGORITHMS.get(self.gradients, "backend")
        reduction = "naive" if algorithm != "backend" or self.gradients == "naive" else "bucketed"
        # The buckets are so small that there are several before and after that of the rarely used parameter.
        return Config(
            zero=ZeroConfig(**GRADIENTS[self.gradients], shard=shard),
            precision=PrecisionConfig(POLICIES[self.dtype], initial_scale=1024.0),
            model=self.model_config,
            mesh=MeshConfig(**layout.mesh.sizes),
            parallel=ParallelConfig(**{name: value for name, value in parallel.items() if value is not None}),
            data=DataConfig(seq_len=self.seq_len),
            optim=optim,
            comm=CommConfig(gradients=reduction, algorithm=algorithm, bucket_mib=0.004),
            consistency=MODES.get(self.gradients, ConsistencyConfig()),
            train=TrainConfig(
                steps=STEPS,
                eval_every=0,
                global_batch=GLOBAL_BATCH,
                micro_batches=self.num_micro_batches,
                seed=SEED,
            ),
            checkpoint=CheckpointConfig(every=0),  # asynchronous workers would pause
            recompute=self.recompute,
            engine=self.engine,
        )

    def batch_shares(self) -> tuple[float, ...] | None:
        """Return the fraction of the global batch for each data-parallel rank, as weights; None if all are equal.

        Unequal weights are 0, 1, 2, ...: the first rank has no samples.
        """
        if self.shares == "equal":
            return None
        return tuple(float(rank) for rank in range(self.mesh_layout.dp))

    def make_loader(self) -> Loader:
        """Make a loader of the case's samples, which are synthetic text."""
        return Loader(_synthetic_text(), self.seq_len, SEED, min_length=1 if self.padding else None)

    def adjust_labels(self, step: int, batch: Batch) -> Batch:
        """Return a copy of a batch in which the labels are changed as the switches of the case require in this step.

        padding: the first samples of the batch predict only two tokens, always the same ones, so a mean of the ranks'
        mean losses is far from the mean over all tokens. clip: in step CLIPPED_STEP all labels are equal, so the
        gradient is large. empty_step: in step EMPTY_STEP no label counts.
        """
        labels = batch.labels.clone()
        if self.padding:
            short = batch.samples % GLOBAL_BATCH < SHORT_SAMPLES
            labels[short, 2:] = IGNORE_INDEX
            labels[short] = labels[short].masked_fill(labels[short] != IGNORE_INDEX, 7)
        if self.clip and step == CLIPPED_STEP:
            labels.masked_fill_(labels != IGNORE_INDEX, 7)
        if self.empty_step and step == EMPTY_STEP:
            labels.fill_(IGNORE_INDEX)
        return dataclasses.replace(batch, labels=labels)


@cache
def _synthetic_text():
    """Return the text from which all cases draw their samples; generated once."""
    return generate_text(TEXT_LENGTH)


def _round_up(value: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is at least `value`."""
    return -(-value // divisor) * divisor
