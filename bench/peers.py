"""Peers of the `peers` extra. Each is left out, with one line that says so, where it cannot be imported."""

import importlib.util
import os
from collections.abc import Mapping

import torch

from bench.contenders import Reducing


def missing(module: str) -> str | None:
    """Why a peer is left out, or None when its package is installed."""
    if importlib.util.find_spec(module):
        return None
    return f"{module} is not installed: pip install 'minidist[peers]'"


def runnable(needs: Mapping[str, str | None], ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """(names that can run here, a line for each that cannot). needs: of each, the package, None for what is here."""
    names, left_out = [], []
    for name, package in needs.items():
        reason = missing(package) if package else None
        if reason is None and name.startswith("DeepSpeed") and global_batch % ranks:
            reason = f"its batch of {global_batch} must divide by {ranks} ranks"
        if reason is None:
            names.append(name)
        else:
            left_out.append(f"{name} left out: {reason}")
    return names, left_out


class DeepSpeed(Reducing):
    """DeepSpeed's engine with ZeRO stage 0: plain data parallelism, in float32."""

    def prepare(self, model):
        import deepspeed

        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))  # it refuses to start without
        self.optimizer = self.work.adamw(model.parameters())
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config={
                "train_batch_size": self.work.global_batch,
                "train_micro_batch_size_per_gpu": self.work.global_batch // self.size,
                "steps_per_print": 10**9,
                **self.settings(),
            },
        )

    def settings(self) -> dict:
        """What of its configuration is the stage's own."""
        return {"zero_optimization": {"stage": 0}}

    def backward(self, loss):
        self.model.backward(loss)

    def update(self):
        # Its own clipping, in float32, keeps the norm to itself: the step clips as the others do, before this.
        self.model.step()


class FairScale(Reducing):
    """FairScale's ShardedDDP over OSS: each gradient is reduced to the one rank that updates the parameter (ZeRO-2)."""

    def prepare(self, model):
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        self.optimizer = OSS(model.parameters(), torch.optim.AdamW, **self.work.adamw_arguments())
        self.model = ShardedDataParallel(model, self.optimizer)
        # With gradients set to None it sums into buffers of the step before.
        self.optimizer.zero_grad(set_to_none=False)

    def gradients(self):
        mine = {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}
        held = {name for name, p in self.model.module.named_parameters() if id(p) in mine}
        return {name: grad for name, grad in super().gradients().items() if name in held}

    def clip(self):
        return self.optimizer.clip_grad_norm(self.work.clip_norm).item()

    def update(self):
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)
