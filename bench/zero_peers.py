"""The peers of `python -m bench zero`: other systems that shard model states over data-parallel ranks, by stage.

Each takes the step of a careful user, as in `contenders.py`: the same model and values, the loss over the count of the
global batch, the norm of the whole gradient, clipping to it, AdamW in its fused kernel. Where a peer only clips by its
own hand, it does. Gradients that are shown to whoever inspects them are whole: a peer that keeps shards gathers them,
then only.
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

from bench import peers
from bench.contenders import Contender, ContenderContext, Reducing
from bench.workload import named_gradients


class TorchZero1(Reducing):
    """torch's ZeroRedundancyOptimizer behind DistributedDataParallel: whole parameters, each updated on one rank."""

    def prepare(self, model):
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, **self.work.adamw_arguments()
        )
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)


class FSDP2(Reducing):
    """torch's fully_shard of every layer and of the rest. reshard: stage 3; else parameters stay after forward.

    backend: what everything between its ranks goes through; that of the launch when None.
    """

    def __init__(self, context: ContenderContext, reshard: bool, backend: str | None = None):
        self.reshard, self.group = reshard, dist.new_group(backend=backend)
        super().__init__(context)

    def prepare(self, model):
        mesh = DeviceMesh.from_group(self.group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
        self.model = fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard)
        self.optimizer = self.work.adamw(self.model.parameters())

    def reduce(self, tensor, async_op=False):
        return dist.all_reduce(tensor, group=self.group, async_op=async_op)

    def gradients(self):
        return {name: grad.full_tensor() for name, grad in named_gradients(self.model).items()}

    def clip(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip_norm)
        return norm.full_tensor().item()


class FairScaleOSS(Reducing):
    """FairScale's OSS behind DistributedDataParallel (ZeRO-1)."""

    def prepare(self, model):
        from fairscale.optim.oss import OSS

        self.optimizer = OSS(model.parameters(), torch.optim.AdamW, **self.work.adamw_arguments())
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)


# Elements: by default each is 2 GB, for a model of 21 MB; a careful user asks for what DDP takes.
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
BUCKET_BYTES = 25 * 2**20


class DeepSpeed(peers.DeepSpeed):
    """The same engine with ZeRO stage 1, 2 or 3."""

    def __init__(self, context: ContenderContext, stage: int):
        self.stage = stage
        super().__init__(context)

    def prepare(self, model):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        super().prepare(model)

    def settings(self) -> dict:
        return {
            "gradient_clipping": self.work.clip_norm if self.full else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, **dict.fromkeys(_BUCKETS, BUCKET_BYTES // 4)},
        }

    def gradients(self):
        from deepspeed.utils import safe_get_full_grad

        return {self.names[id(parameter)]: safe_get_full_grad(parameter) for parameter in self.model.parameters()}

    def clip(self):
        """It clips inside of its step, and tells the norm after it."""
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def update(self):
        if not self.full:
            self.model.step()


class Peer(NamedTuple):
    """stage: 1, 2 or 3, which with the backend decides what it is compared with. needs: a package, None for torch's
    own."""

    stage: int
    make: Callable[[ContenderContext], Contender]
    needs: str | None = None
    backend: str = "gloo"


PEERS: dict[str, Peer] = {
    "torch ZeRO-1": Peer(1, TorchZero1),
    "FairScale OSS": Peer(1, FairScaleOSS, "fairscale"),
    "DeepSpeed ZeRO-1": Peer(1, partial(DeepSpeed, stage=1), "deepspeed"),
    "torch FSDP2, parameters kept": Peer(2, partial(FSDP2, reshard=False)),
    "FairScale ShardedDDP": Peer(2, peers.FairScale, "fairscale"),
    "DeepSpeed ZeRO-2": Peer(2, partial(DeepSpeed, stage=2), "deepspeed"),
    "torch FSDP2": Peer(3, partial(FSDP2, reshard=True)),
    "DeepSpeed ZeRO-3": Peer(3, partial(DeepSpeed, stage=3), "deepspeed"),
    "FSDP2 on shm, parameters kept": Peer(2, partial(FSDP2, reshard=False, backend="shm"), backend="shm"),
    "FSDP2 on shm": Peer(3, partial(FSDP2, reshard=True, backend="shm"), backend="shm"),
}


def present(ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """(names of the peers that can run here, a line for each that cannot)."""
    return peers.runnable({name: peer.needs for name, peer in PEERS.items()}, ranks, global_batch)
