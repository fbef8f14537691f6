"""Baselines that need the optional packages of the `peers` extra: DeepSpeed and FairScale.

A baseline whose package is not installed is left out of a comparison, and one line of the output says so.
"""

import importlib.util
import os
from collections.abc import Mapping

import torch

from bench.contenders import AllReduceContender


def find_available(packages: Mapping[str, str | None], ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """Return the names of the contenders that can run here, and one line for each that cannot.

    packages: the optional package that each contender needs, by contender; None for no package.
    """
    names, left_out = [], []
    for name, package in packages.items():
        if package and not importlib.util.find_spec(package):
            left_out.append(f"{name} left out: {package} is not installed: pip install -e '.[peers]'")
        elif name.startswith("DeepSpeed") and global_batch % ranks:
            left_out.append(f"{name} left out: its global batch of {global_batch} must divide by {ranks} ranks")
        else:
            names.append(name)
    return names, left_out


class DeepSpeed(AllReduceContender):
    """DeepSpeed's engine with ZeRO stage 0: plain data parallelism, in float32."""

    def prepare(self, model):
        import deepspeed

        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))  # DeepSpeed raises without it
        self.optimizer = self.work.build_adamw(model.parameters())
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config={
                "train_batch_size": self.work.global_batch,
                "train_micro_batch_size_per_gpu": self.work.global_batch // self.size,
                "steps_per_print": 10**9,
                **self.zero_config(),
            },
        )

    def zero_config(self) -> dict:
        """Return the part of DeepSpeed's configuration that depends on the ZeRO stage."""
        return {"zero_optimization": {"stage": 0}}

    def backward(self, loss):
        self.model.backward(loss)

    def update(self):
        # DeepSpeed's own clipping in float32 does not return the norm, so `step` has clipped already.
        self.model.step()


class FairScaleShardedDDP(AllReduceContender):
    """FairScale's ShardedDDP over OSS (ZeRO-2): each gradient is reduced to the rank that updates its parameter."""

    def prepare(self, model):
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        self.optimizer = OSS(model.parameters(), torch.optim.AdamW, **self.work.adamw_arguments())
        self.model = ShardedDataParallel(model, self.optimizer)
        # If gradients are None, ShardedDDP accumulates into its buffers of the previous step.
        self.optimizer.zero_grad(set_to_none=False)

    def gradients(self):
        owned = {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}
        names = {name for name, p in self.model.module.named_parameters() if id(p) in owned}
        return {name: grad for name, grad in super().gradients().items() if name in names}

    def clip(self):
        return self.optimizer.clip_grad_norm(self.work.clip_norm).item()

    def update(self):
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)
