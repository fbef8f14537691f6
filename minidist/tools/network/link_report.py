"""The link report of `minidist doctor`: latency and bandwidth of each backend, compared with plain copies."""

from collections.abc import Sequence

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer
from minidist.tools.launch.gpus import count_gpus

# (name in the report, torch's name of the backend, device of the ranks)
LINKS = (("gloo", "gloo", "cpu"), ("shm", "shm", "cpu"), ("nccl", "nccl", "cuda"), ("shm on one GPU", "shm", "cuda:0"))
RANKS = 2
_DEADLINE_S = 60.0


def report_link_speeds(
    links: Sequence[tuple[str, str, str]] = LINKS, num_ranks: int = RANKS, large_bytes: int | None = None
) -> list[str]:
    """Measure latency and bandwidth of each link between new ranks; return a line on the units, then a line per link.

    A line says the link's speed, or why it cannot be measured here. links: (name in the report, torch's name of the
    backend, device of the ranks). num_ranks: number of ranks. large_bytes: size of the large tensors; None: 64 MiB.
    Links on "cuda:0", the same GPU for all ranks, are left out without a GPU.
    """
    from minidist.tools.network.link_speed import LARGE, TURNS, measure_link_speed

    large_bytes = large_bytes or LARGE
    lines = [
        f"{num_ranks} ranks: 4 bytes in us, {large_bytes / 2**20:g} MiB in GB/s (1e9 bytes sent by each rank), and in "
        "plain copies by all ranks at once"
    ]
    with RankServer() as server:
        for name, backend, device in links:
            if device == "cuda:0" and not count_gpus():
                continue
            reason = explain_unavailable_backend(backend, num_ranks)
            if reason is None:
                options = {"backend": backend, "device": device, "deadline_s": _DEADLINE_S}
                try:
                    found = server.run(measure_link_speed, num_ranks, (large_bytes, TURNS), **options).values[0]
                except (RunError, UserError) as error:
                    reason = f"does not run: {str(error).splitlines()[0]}"
                else:
                    fell_back = backend == "shm" and not found.shared_memory
                    reason = (
                        "not available: these ranks cannot share memory, and fall back to gloo" if fell_back else None
                    )
            lines.append(f"{name}: {reason or format_link_speed(found, num_ranks, large_bytes)}")
    return lines


def explain_unavailable_backend(backend: str, num_ranks: int) -> str | None:
    """Return why `backend` cannot be measured with `num_ranks` ranks on this machine; None if it can be tried."""
    import torch

    there = torch.distributed.is_available()
    if backend == "gloo" and not (there and torch.distributed.is_gloo_available()):
        return "not available: this torch has no gloo"
    if backend == "nccl" and not (there and torch.distributed.is_nccl_available()):
        return "not available: this torch has no nccl"
    if backend == "nccl" and count_gpus() < num_ranks:
        return f"not measured: {num_ranks} ranks need a GPU each, and torch sees {count_gpus()}"
    return None


def format_link_speed(speed, num_ranks: int, large_bytes: int) -> str:
    """Return a measured `LinkSpeed` as a line of text: latency in us, bandwidth in GB/s sent by each rank.

    num_ranks: number of ranks, n. large_bytes: size of the large tensors of the measurement. Each rank sends all bytes
    of a message, and 2 (n - 1) / n of the bytes of an all-reduce.
    """
    sent = {"message": large_bytes, "all-reduce": 2 * large_bytes * (num_ranks - 1) / num_ranks}
    small = {"message": speed.small_message_s, "all-reduce": speed.small_all_reduce_s}
    whole = {"message": speed.large_message_s, "all-reduce": speed.large_all_reduce_s}
    parts = [
        f"{name} {small[name] * 1e6:.0f} us, {sent[name] / whole[name] / 1e9:.2g} GB/s = "
        f"{whole[name] / speed.copy_s:.1f} copies"
        for name in sent
    ]
    return "; ".join([*parts, f"a copy {large_bytes / speed.copy_s / 1e9:.2g} GB/s"])
