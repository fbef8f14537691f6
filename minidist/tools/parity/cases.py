"""A case of parity: a layout and the switches, and what they mean for model, data and optimizer."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from minidist.config import (
    CommConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from minidist.data.loader import IGNORED, Batch, Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.tools.parity.layouts import Layout
from minidist.tools.parity.probe import Probe

STEPS = 5
GLOBAL_BATCH = 29  # a prime: no number of ranks or micro-batches divides it
TEXT_LENGTH = 4000
SEED = 11
CLIPPED_STEP = 1  # in cases that clip, the one whose gradient is beyond the norm
EMPTY_STEP = 2  # in cases with an empty step, no token of this one counts
RESUME_AFTER = 3
SHORT_SAMPLES = 13  # under padding, the first of each global batch, so that no equal cut of it has equal counts

# How gradients get to who updates with them.
GRADIENTS = {
    "bucketed": {},
    "naive": {},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2-whole": {"stage": 2, "keep_gradients": True},
    "zero3": {"stage": 3},
    "zero3-freed": {"stage": 3, "keep_last_block": False, "prefetch": False},
    "zero1-hybrid": {"stage": 1},
    "zero3-hybrid": {"stage": 3},
}

# Everything about a case that is not its world. The first value of a switch is the plain one.
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
}

# float64: the sums of five AdamW steps in another order move parameters by 1e-12 of the largest; 1e-10 leaves room.
# float32: 1 eps = 1.2e-7; a loss or norm is one sum of some hundred terms (16 eps), a gradient the sum of products over
# layers (84 eps). Under AdamW a tiny gradient whose sign is in its last bits moves its parameter by a whole learning
# rate, and Muon makes a tiny singular value 480 times larger, so there parameters are reported and not judged.
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
    (dtype, optimizer): judged
    if dtype == "float64" or optimizer == "sgd"
    else {kind: value for kind, value in judged.items() if kind != "param"}
    for dtype, judged in {**_FULL, **_HALF}.items()
    for optimizer in ("adamw", "sgd", "muon")
}

# Of 16 bits are the parameters and all that is computed; the reference has them in float32.
POLICIES = {"float64": "fp64", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Case:
    """One row of the table: a layout and a value for every switch.

    ranks: for how many the model's sizes are made, whatever the layout; layers: of the model. Cases that agree in them
    have the same model, and may have the same reference.
    """

    ranks: int
    layers: int
    plan: Layout
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

    @property
    def world(self) -> int:
        return self.plan.mesh.world_size

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return 1 if self.micro_batches == 1 else max(self.micro_batches, 2 * self.plan.pp)

    @property
    def layout(self) -> str:
        """How the case is laid out and what is unusual in it: one word for each switch that is not plain."""
        said = [str(self.plan), self.gradients]
        if self.parts > 1:
            said.append(f"micro-batches={self.parts}")
        said.append("tied" if self.tied else "untied")
        said += [name for name in ("padding", "clip", "empty_step", "resume") if getattr(self, name)]
        if self.dropout:
            said.append(f"dropout={self.dropout}")
        said += [f"{getattr(self, name)}-{name}" for name in ("start", "shares") if getattr(self, name) != "equal"]
        said += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        return " ".join(said).replace("_", "-")

    @property
    def name(self) -> str:
        """The row's whole name, which `--only` searches."""
        return f"{self.layout} {self.dtype} {self.optimizer}"

    @property
    def reference(self) -> "Case":
        """The part of a case that one process can have; the same reference serves every case that shares it."""
        plain = {
            "gradients": "bucketed",
            "micro_batches": 1,
            "start": "equal",
            "shares": "equal",
            "resume": False,
            "recompute": "none",
        }
        dtype = "float32" if self.dtype in HALF else self.dtype
        return dataclasses.replace(self, plan=Layout(), dtype=dtype, **plain)

    @property
    def tolerance(self) -> dict[str, float]:
        return TOLERANCES[self.dtype, self.optimizer]

    def lr(self, step: int) -> float:
        """Learning rate of a step: another one in each, as a schedule would have it.

        SGD's is smaller for a deeper model: at 0.1 the rounding errors of 16 layers grew fiftyfold in five steps.
        """
        return (0.2 / self.layers if self.optimizer == "sgd" else 1e-3) / (1 + 0.2 * step)

    def model(self, seed: int = SEED) -> Probe:
        """The model with its initial values, in the dtype of the case."""
        model = Probe(self.shape)
        init_parameters(model, seed)
        return model.to(torch.float64 if self.dtype == "float64" else torch.float32)

    @property
    def shape(self) -> ModelConfig:
        """A model that every layout of so many ranks can share: its sizes are multiples of their number.

        It has fewer key and value heads than some have tensor ranks.
        """
        heads = math.lcm(4, self.ranks)
        return ModelConfig(
            vocab_size=_multiple(128, self.ranks),
            hidden_size=4 * heads,
            intermediate_size=_multiple(40, self.ranks),
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=2 if heads & (heads - 1) == 0 else 1,  # with 2 of them no 3 ranks can share the heads
            tie_embeddings=self.tied,
            dropout=self.dropout,
            init_std=0.1,
        )

    @property
    def seq_len(self) -> int:
        """Tokens of a sample: every layout cuts them into equal parts, a ring into twice as many as ranks."""
        return _multiple(12, 2 * self.ranks)

    def config(self, clip_norm: float | None = None) -> Config:
        """The run's configuration. clip_norm: for cases that clip, as the reference found it."""
        # The rate here is not that of any step. Adam's usual eps of 1e-8 is below the rounding of a float32 gradient:
        # elements that should be zero would move by whole learning rates, and later gradients would show it.
        optim = OptimConfig(kind=self.optimizer, lr=1.0, weight_decay=0.1, momentum=0.5, eps=1e-5, clip_norm=clip_norm)
        # Buckets so small that the model has many, before and after the one with the rarely used parameter.
        plan = self.plan
        how = {"schedule": plan.schedule, "sequence": plan.sequence, "context": plan.context}
        ranks = plan.dp * plan.cp
        shard = ranks // 2 if self.gradients.endswith("hybrid") else None
        return Config(
            zero=ZeroConfig(**GRADIENTS[self.gradients], shard=shard),
            precision=PrecisionConfig(POLICIES[self.dtype], initial_scale=1024.0),
            model=self.shape,
            mesh=MeshConfig(**plan.mesh.sizes),
            parallel=ParallelConfig(**{name: value for name, value in how.items() if value is not None}),
            data=DataConfig(seq_len=self.seq_len),
            optim=optim,
            comm=CommConfig(gradients="naive" if self.gradients == "naive" else "bucketed", bucket_mib=0.004),
            train=TrainConfig(global_batch=GLOBAL_BATCH, micro_batches=self.parts),
            recompute=self.recompute,
        )

    def share_of(self) -> tuple[float, ...] | None:
        """The share of the batch of each rank: when uneven, one rank has nothing and the others differ."""
        if self.shares == "equal":
            return None
        return tuple(float(rank) for rank in range(self.plan.dp))

    def loader(self) -> Loader:
        return Loader(_text(), self.seq_len, SEED, min_length=1 if self.padding else None)

    def shape_labels(self, step: int, batch: Batch) -> Batch:
        """The batch as the case wants it: its labels depend on the step and on each sample's place in the global batch.

        Padding: the first samples predict two tokens, always the same; a mean of means is then far from the mean.
        Clip: in one step all labels are the same, so the gradient is large. Empty step: in one no label counts.
        """
        labels = batch.labels.clone()
        if self.padding:
            short = batch.samples % GLOBAL_BATCH < SHORT_SAMPLES
            labels[short, 2:] = IGNORED
            labels[short] = labels[short].masked_fill(labels[short] != IGNORED, 7)
        if self.clip and step == CLIPPED_STEP:
            labels.masked_fill_(labels != IGNORED, 7)
        if self.empty_step and step == EMPTY_STEP:
            labels.fill_(IGNORED)
        return dataclasses.replace(batch, labels=labels)


@cache
def _text():
    return generate_text(TEXT_LENGTH)


def _multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of
