"""Baselines of `python -m bench zero`: other libraries that shard model states over data-parallel ranks, by ZeRO stage.

Each baseline's step is what a careful user of that library writes, as in `contenders`: the same model and initial
weights, the loss divided by the global token count, clipping by the norm of the full gradient, fused AdamW. A library
that can only clip by its own function uses that function. `gradients` returns full gradients, which a sharded baseline
gathers there, outside of the timed steps.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench import baselines
from bench.contenders import AllReduceContender, Contender, ContenderContext
from bench.workload import named_gradients


class TorchZeroRedundancyOptimizer(AllReduceContender):
    """torch's ZeroRedundancyOptimizer with DDP (ZeRO-1): replicated parameters, each updated on one rank."""

    def prepare(self, model):
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, **self.work.adamw_arguments()
        )
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)


class FSDP2(AllReduceContender):
    """torch's fully_shard (FSDP2), applied to every layer and to the model.

    reshard: free the parameters after forward (ZeRO-3); otherwise keep them until after backward (ZeRO-2). backend: of
    all its communication; None for the default group's.
    """

    def __init__(self, context: ContenderContext, reshard: bool, backend: str | None = None):
        self.reshard, self.group = reshard, dist.new_group(backend=backend)
        super().__init__(context)

    def prepare(self, model):
        mesh = DeviceMesh.from_group(self.group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
        self.model = fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard)
        self.optimizer = self.work.build_adamw(self.model.parameters())

    def reduce(self, tensor, async_op=False):
        return dist.all_reduce(tensor, group=self.group, async_op=async_op)

    def gradients(self):
        return {name: grad.full_tensor() for name, grad in named_gradients(self.model).items()}

    def clip(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip_norm)
        return norm.full_tensor().item()


class FairScaleOSS(AllReduceContender):
    """FairScale's OSS with DDP (ZeRO-1)."""

    def prepare(self, model):
        from fairscale.optim.oss import OSS

        self.optimizer = OSS(model.parameters(), torch.optim.AdamW, **self.work.adamw_arguments())
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)


# DeepSpeed's default buckets hold 2 GB each, for a model of 21 MB; DDP's default is 25 MiB.
_BUCKET_OPTIONS = ("reduce_bucket_size", "allgather_bucket_size")  # in elements
BUCKET_BYTES = 25 * 2**20


class DeepSpeed(baselines.DeepSpeed):
    """DeepSpeed's engine with ZeRO stage 1, 2 or 3."""

    def __init__(self, context: ContenderContext, stage: int):
        self.stage = stage
        super().__init__(context)

    def prepare(self, model):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        super().prepare(model)

    def zero_config(self) -> dict:
        return {
            "gradient_clipping": self.work.clip_norm if self.full else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, **dict.fromkeys(_BUCKET_OPTIONS, BUCKET_BYTES // 4)},
        }

    def gradients(self):
        from deepspeed.utils import safe_get_full_grad

        return {self.names[id(parameter)]: safe_get_full_grad(parameter) for parameter in self.model.parameters()}

    def clip(self):
        """Take DeepSpeed's step, which clips, and return the norm, which is known only after that step."""
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def update(self):
        if not self.full:
            self.model.step()


class Baseline(NamedTuple):
    """A baseline of one ZeRO stage. stage, backend: decide which minidist contender it is compared with.

    package: the optional package that it needs; None if it is part of torch.
    """

    stage: int
    make: Callable[[ContenderContext], Contender]
    package: str | None = None
    backend: str = "gloo"


BASELINES: dict[str, Baseline] = {
    "torch ZeRO-1": Baseline(1, TorchZeroRedundancyOptimizer),
    "FairScale OSS": Baseline(1, FairScaleOSS, "fairscale"),
    "DeepSpeed ZeRO-1": Baseline(1, partial(DeepSpeed, stage=1), "deepspeed"),
    "torch FSDP2 (no reshard)": Baseline(2, partial(FSDP2, reshard=False)),
    "FairScale ShardedDDP": Baseline(2, baselines.FairScaleShardedDDP, "fairscale"),
    "DeepSpeed ZeRO-2": Baseline(2, partial(DeepSpeed, stage=2), "deepspeed"),
    "torch FSDP2": Baseline(3, partial(FSDP2, reshard=True)),
    "DeepSpeed ZeRO-3": Baseline(3, partial(DeepSpeed, stage=3), "deepspeed"),
    "FSDP2 on shm (no reshard)": Baseline(2, partial(FSDP2, reshard=False, backend="shm"), backend="shm"),
    "FSDP2 on shm": Baseline(3, partial(FSDP2, reshard=True, backend="shm"), backend="shm"),
}


def available_baselines(ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """Return the names of the baselines that can run here, and one line for each that cannot."""
    return baselines.find_available({name: spec.package for name, spec in BASELINES.items()}, ranks, global_batch)
