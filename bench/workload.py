"""What is trained: one model, one stream of global batches, one optimizer kernel, for every contender alike."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minidist.config import OptimConfig
from minidist.data.loader import Batch, Loader
from minidist.data.synthetic import generate_text
from minidist.models import ModelConfig, Transformer, init_parameters

MODEL = ModelConfig(
    hidden_size=256,
    intermediate_size=768,
    num_layers=6,
    num_heads=8,
    num_kv_heads=8,
    max_seq_len=128,
    tie_embeddings=False,
    init_std=0.02,
)


@dataclass(frozen=True)
class Workload:
    """A training job small enough to repeat often.

    global_batch: samples per step over all ranks, of `seq_len` tokens. min_length: samples are padded to uneven
    lengths, so that a mean of means is not the mean, and a contender that takes one is found out.
    clip_norm: below the norm of the first steps, so that clipping is active.
    """

    model: ModelConfig = MODEL
    global_batch: int = 8
    seq_len: int = 128
    min_length: int = 96
    seed: int = 1234
    lr: float = 1e-4
    clip_norm: float = 1.0
    distinct_steps: int = 16
    optim: OptimConfig = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "optim", OptimConfig(lr=self.lr, schedule="constant", clip_norm=self.clip_norm))

    def build(self) -> nn.Module:
        """A model with the initial values that every contender starts from."""
        model = Transformer(self.model)
        init_parameters(model, self.seed)
        return model

    def loader(self) -> Loader:
        needed = self.distinct_steps * self.global_batch * self.seq_len + 1
        return Loader(generate_text(needed), self.seq_len, self.seed, min_length=self.min_length)

    def batches(self, rank: int, size: int) -> list["Share"]:
        """This rank's share of `distinct_steps` global batches, cut by the loader as the trainer cuts them."""
        loader, shares = self.loader(), []
        for step in range(self.distinct_steps):
            position = step * self.global_batch
            (mine,) = loader.micro_batches(position, self.global_batch, rank, size, 1)
            shares.append(Share(mine, loader.global_batch(position, self.global_batch).count))
        return shares

    def adamw(self, parameters) -> torch.optim.AdamW:
        """The optimizer of the peers: class, hyperparameters and kernel of `minidist.train.engine.make_optimizer`."""
        return torch.optim.AdamW(parameters, **self.adamw_arguments())

    def adamw_arguments(self) -> dict:
        o = self.optim
        return {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay, "fused": True}


SIZES = {
    "default": Workload(),
    "tiny": Workload(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, max_seq_len=32, tie_embeddings=False),
        seq_len=32,
        min_length=16,
    ),
}


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch, and the number of tokens that count in the whole of it."""

    batch: Batch
    global_count: int


def kernel_of(optimizer: torch.optim.Optimizer) -> str:
    """Name of the update kernel an optimizer runs, read from its own settings: "AdamW fused"."""
    settings = {
        "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"
        for group in optimizer.param_groups
    }
    return f"{type(optimizer).__name__} {'/'.join(sorted(settings))}"


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """`.grad` of every parameter that has one, under the names of the plain model."""
    return {
        name.removeprefix("module."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
