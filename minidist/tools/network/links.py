"""What `minidist doctor` tells of the links between ranks: each backend's latency and bandwidth beside plain copies."""

from collections.abc import Sequence

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

# What to call it, torch's name of the backend, where the ranks compute.
LINKS = (("gloo", "gloo", "cpu"), ("shm", "shm", "cpu"), ("nccl", "nccl", "cuda"), ("shm on one GPU", "shm", "cuda:0"))
RANKS = 2
_DEADLINE_S = 60.0


def links(wanted: Sequence[tuple[str, str, str]] = LINKS, ranks: int = RANKS, large: int | None = None) -> list[str]:
    """A line on what the lines say, then one for each link: its figures, or why it has none here.

    large: bytes of the large tensors, for who cannot wait. Several ranks on one GPU are left out where there is none.
    """
    from minidist.tools.network.link_speed import LARGE, TURNS, figures

    large = large or LARGE
    lines = [
        f"{ranks} ranks: 4 bytes in us, {large / 2**20:g} MiB in GB/s (1e9 bytes sent by each rank), and in "
        "plain copies by all ranks at once"
    ]
    with RankServer() as server:
        for name, backend, device in wanted:
            if device == "cuda:0" and not gpus():
                continue
            reason = missing(backend, ranks)
            if reason is None:
                options = {"backend": backend, "device": device, "deadline_s": _DEADLINE_S}
                try:
                    found = server.run(figures, ranks, (large, TURNS), **options).values[0]
                except (RunError, UserError) as error:
                    reason = f"does not run: {str(error).splitlines()[0]}"
                else:
                    fell_back = backend == "shm" and not found.shared
                    reason = "not here: these ranks cannot share memory, and talk over gloo" if fell_back else None
            lines.append(f"{name}: {reason or told(found, ranks, large)}")
    return lines


def gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def missing(backend: str, ranks: int) -> str | None:
    """Why the backend cannot be measured on that many ranks of this machine; None when it can be tried."""
    import torch

    there = torch.distributed.is_available()
    if backend == "gloo" and not (there and torch.distributed.is_gloo_available()):
        return "not here: this torch has no gloo"
    if backend == "nccl" and not (there and torch.distributed.is_nccl_available()):
        return "not here: this torch has no nccl"
    if backend == "nccl" and gpus() < ranks:
        return f"not measured: {ranks} ranks need a GPU each, and torch sees {gpus()}"
    return None


def told(found, ranks: int, large: int) -> str:
    """The figures (`comm.links.Figures`) in words. A rank sends a message whole, and 2 (n - 1) / n of an all-reduce."""
    sent = {"message": large, "all-reduce": 2 * large * (ranks - 1) / ranks}
    small = {"message": found.small_message_s, "all-reduce": found.small_all_reduce_s}
    whole = {"message": found.large_message_s, "all-reduce": found.large_all_reduce_s}
    parts = [
        f"{name} {small[name] * 1e6:.0f} us, {sent[name] / whole[name] / 1e9:.2g} GB/s = "
        f"{whole[name] / found.copy_s:.1f} copies"
        for name in sent
    ]
    return "; ".join([*parts, f"a copy {large / found.copy_s / 1e9:.2g} GB/s"])
