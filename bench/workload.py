"""The training job of the benchmarks: one model, one sequence of global batches, one optimizer for all contenders."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minidist.config import OptimConfig
from minidist.data.loader import Batch, Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer

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
    """A training job small enough to repeat often: model, batches and AdamW hyperparameters.

    global_batch: samples per step over all ranks, each of `seq_len` tokens. min_length: samples have random lengths of
    at least `min_length` tokens and are padded, so that ranks have different token counts: a contender that averages
    the ranks' mean losses computes a wrong loss. clip_norm: below the gradient norm of the first steps, so that
    clipping is active. distinct_batches: number of global batches before they repeat.
    """

    model: ModelConfig = MODEL
    global_batch: int = 8
    seq_len: int = 128
    min_length: int = 96
    seed: int = 1234
    lr: float = 1e-4
    clip_norm: float = 1.0
    distinct_batches: int = 16
    optim: OptimConfig = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "optim", OptimConfig(lr=self.lr, schedule="constant", clip_norm=self.clip_norm))

    def build_model(self) -> nn.Module:
        """Build the model with the initial weights that all contenders start from."""
        model = Transformer(self.model)
        init_parameters(model, self.seed)
        return model

    def build_loader(self) -> Loader:
        """Build the loader of the synthetic text that all contenders train on."""
        num_tokens = self.distinct_batches * self.global_batch * self.seq_len + 1
        return Loader(generate_text(num_tokens), self.seq_len, self.seed, min_length=self.min_length)

    def rank_batches(self, rank: int, size: int) -> list["RankBatch"]:
        """Return this rank's part of each global batch, partitioned by the loader as in `minidist train`."""
        loader, batches = self.build_loader(), []
        for step in range(self.distinct_batches):
            position = step * self.global_batch
            (local_batch,) = loader.micro_batches(position, self.global_batch, rank, size, 1)
            batches.append(RankBatch(local_batch, loader.global_batch(position, self.global_batch).num_loss_tokens))
        return batches

    def build_adamw(self, parameters) -> torch.optim.AdamW:
        """Build the baselines' optimizer: the class, hyperparameters and kernel of minidist's `make_optimizer`."""
        return torch.optim.AdamW(parameters, **self.adamw_arguments())

    def adamw_arguments(self) -> dict:
        """Return the keyword arguments of `torch.optim.AdamW`, for baselines that construct it themselves."""
        o = self.optim
        return {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay, "fused": True}


WORKLOADS = {
    "default": Workload(),
    "tiny": Workload(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, max_seq_len=32, tie_embeddings=False),
        seq_len=32,
        min_length=16,
    ),
}


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch, and the number of target tokens in the global batch."""

    batch: Batch
    global_token_count: int


def optimizer_kernel(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class and update kernel, such as "AdamW fused", read from its parameter groups."""
    kernels = {
        "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"
        for group in optimizer.param_groups
    }
    return f"{type(optimizer).__name__} {'/'.join(sorted(kernels))}"


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the `.grad` of every parameter that has one, by parameter name without DDP's prefix `module.`."""
    return {
        name.removeprefix("module."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
