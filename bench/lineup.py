"""The contenders: name to contender, ours first, then the peers to compare with, the floor last."""

from collections.abc import Callable
from functools import partial

from bench import peers
from bench.contenders import Contender, ContenderContext, Floor, Ours, TorchDDP
from bench.contest import FLOOR

OURS = "minidist"
REFERENCE_PEER = "torch DDP"

LINEUP: dict[str, Callable[[ContenderContext], Contender]] = {
    OURS: Ours,
    "minidist naive": partial(Ours, gradients="naive"),
    REFERENCE_PEER: TorchDDP,
    "torch DDP bucket view": partial(TorchDDP, gradient_as_bucket_view=True),
    "DeepSpeed ZeRO-0": peers.DeepSpeed,
    "FairScale ShardedDDP": peers.FairScale,
    FLOOR: Floor,
}
_NEEDS = {"DeepSpeed ZeRO-0": "deepspeed", "FairScale ShardedDDP": "fairscale"}


def present(ranks: int, global_batch: int) -> tuple[list[str], list[str]]:
    """(names that can run here, a line for each that cannot)."""
    return peers.runnable({name: _NEEDS.get(name) for name in LINEUP}, ranks, global_batch)
