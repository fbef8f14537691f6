"""The link report of `minidist doctor`: latency and bandwidth of each backend, compared with plain copies."""

from collections.abc import Sequence

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer

# (name in the report, torch's name of the backend, device of the ranks)
LINKS = (("gloo", "gloo", "cpu"), ("shm", "shm", "cpu"), ("nccl", "nccl", "cuda"), ("shm on one GPU", "shm", "cuda:0"))
RANKS = 2
_DEADLINE_S = 60.0


def describe_links(
    wanted: Sequence[tuple[str, str, str]] = LINKS, ranks: int = RANKS, large: int | None = None
) -> list[str]:
    """A line that explains the units, then one per link: its speed, or why it cannot be measured here.

    large: bytes of the large tensors; smaller ones take less time. Several ranks on one GPU are left out without a GPU.
    """
    from minidist.tools.network.link_speed import LARGE, TURNS, measure_link_speed

    large = large or LARGE
    lines = [
        f"{ranks} ranks: 4 bytes in us, {large / 2**20:g} MiB in GB/s (1e9 bytes sent by each rank), and in "
        "plain copies by all ranks at once"
    ]
    with RankServer() as server:
        for name, backend, device in wanted:
            if device == "cuda:0" and not count_gpus():
                continue
            reason = why_unavailable(backend, ranks)
            if reason is None:
                options = {"backend": backend, "device": device, "deadline_s": _DEADLINE_S}
                try:
                    found = server.run(measure_link_speed, ranks, (large, TURNS), **options).values[0]
                except (RunError, UserError) as error:
                    reason = f"does not run: {str(error).splitlines()[0]}"
                else:
                    fell_back = backend == "shm" and not found.shared
                    reason = (
                        "not available: these ranks cannot share memory, and fall back to gloo" if fell_back else None
                    )
            lines.append(f"{name}: {reason or format_link_speed(found, ranks, large)}")
    return lines


def count_gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def why_unavailable(backend: str, ranks: int) -> str | None:
    """Why the backend cannot be measured with that many ranks on this machine; None if it can be tried."""
    import torch

    there = torch.distributed.is_available()
    if backend == "gloo" and not (there and torch.distributed.is_gloo_available()):
        return "not available: this torch has no gloo"
    if backend == "nccl" and not (there and torch.distributed.is_nccl_available()):
        return "not available: this torch has no nccl"
    if backend == "nccl" and count_gpus() < ranks:
        return f"not measured: {ranks} ranks need a GPU each, and torch sees {count_gpus()}"
    return None


def format_link_speed(found, ranks: int, large: int) -> str:
    """A `LinkSpeed` as text. Each rank sends a whole message, and 2 (n - 1) / n of an all-reduce's tensor."""
    sent = {"message": large, "all-reduce": 2 * large * (ranks - 1) / ranks}
    small = {"message": found.small_message_s, "all-reduce": found.small_all_reduce_s}
    whole = {"message": found.large_message_s, "all-reduce": found.large_all_reduce_s}
    parts = [
        f"{name} {small[name] * 1e6:.0f} us, {sent[name] / whole[name] / 1e9:.2g} GB/s = "
        f"{whole[name] / found.copy_s:.1f} copies"
        for name in sent
    ]
    return "; ".join([*parts, f"a copy {large / found.copy_s / 1e9:.2g} GB/s"])
