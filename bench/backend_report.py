"""Output of `python -m bench comm`: a table in the terminal and a plot, with the targets that shm should meet."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from rich.console import Console
from rich.table import Table

from bench.bootstrap import ConfidenceInterval

# Lower limits of gloo's time over shm's, by operation and bytes (0 for a training step).
MIN_RATIOS = {
    ("all_reduce", 4 * 2**10): 20.0,
    ("all_reduce", 256 * 2**10): 8.0,
    ("all_reduce", 4 * 2**20): 3.0,
    ("all_reduce", 64 * 2**20): 2.5,
    **{(name, size * 2**20): 4.0 for name in ("reduce_scatter", "all_gather") for size in (4, 64)},
    **{("send_recv", size * 2**20): 1.5 for size in (4, 64)},
    ("DDP", 0): 1.1,
    ("FSDP2", 0): 1.4,
}
# Upper limits of shm's all_reduce over a plain copy of COPY_LIMIT_BYTES by all ranks at once, by number of ranks.
MAX_COPY_RATIOS = {2: 1.5, 4: 2.0}
COPY_LIMIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class OperationResult:
    """Times of one operation of `bytes` bytes on gloo and on shm, or of one training step (0 bytes), in seconds.

    ratio, cpu_ratio: gloo's over shm's wall time, and CPU time of all ranks, which a busy machine disturbs less.
    copy_ratio: shm's time over that of a plain copy of the tensor; None for training steps.
    """

    ranks: int
    name: str
    bytes: int
    gloo_s: float
    shm_s: float
    ratio: ConfidenceInterval
    cpu_ratio: ConfidenceInterval
    copy_ratio: ConfidenceInterval | None = None

    @property
    def min_ratio(self) -> float | None:
        """Lower limit of `ratio`; None if there is none for this operation and size."""
        return MIN_RATIOS.get((self.name, self.bytes))

    @property
    def verdict(self) -> str:
        """Whether the result meets its targets: "met", or "MISSED" with the limits; "" if it has no target."""
        missed = []
        if self.min_ratio and self.ratio.median < self.min_ratio:
            missed.append(f"gloo / shm >= {self.min_ratio:g}")
        limit = MAX_COPY_RATIOS.get(self.ranks)
        has_copy_limit = limit and self.name == "all_reduce" and self.bytes == COPY_LIMIT_BYTES
        if has_copy_limit and self.copy_ratio.median > limit:
            missed.append(f"shm / copy <= {limit:g}")
        if missed:
            return f"MISSED: {', '.join(missed)}"
        return "met" if self.min_ratio else ""


def format_size(size: int) -> str:
    """Format a number of bytes as KiB or MiB; "step" for 0."""
    return f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" if size else "step"


def print_results(results: Sequence[OperationResult], console: Console) -> None:
    """Print the table of all results."""
    table = Table("ranks", "operation", "size", "gloo ms", "shm ms", "gloo / shm [95 %]", "CPU", "shm / copy", "target")
    for result in results:
        table.add_row(
            str(result.ranks),
            result.name,
            format_size(result.bytes),
            f"{result.gloo_s * 1e3:.3f}",
            f"{result.shm_s * 1e3:.3f}",
            f"{result.ratio.median:.2f} [{result.ratio.low:.2f}, {result.ratio.high:.2f}]",
            f"{result.cpu_ratio.median:.2f}",
            "" if result.copy_ratio is None else f"{result.copy_ratio.median:.2f}",
            result.verdict,
        )
    console.print(table)


def plot(results: Sequence[OperationResult], title: str, path) -> None:
    """Plot gloo's time over shm's as bars, one panel per number of ranks; a red line across a bar is its target."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({result.ranks for result in results})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(6.5 * len(counts), 4.8), squeeze=False, layout="constrained"
    )
    for ranks, axis in zip(counts, axes[0], strict=True):
        panel = [result for result in results if result.ranks == ranks]
        names = [f"{result.name} {format_size(result.bytes)}" for result in panel]
        axis.barh(names, [result.ratio.median for result in panel], color="#4c72b0")
        for y, result in enumerate(panel):
            axis.text(result.ratio.median, y, f" {result.ratio.median:.1f}", va="center", fontsize=8)
            if result.min_ratio:
                axis.plot([result.min_ratio] * 2, [y - 0.4, y + 0.4], color="#c44e52")
        axis.axvline(1.0, color="#777777", linewidth=1)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.set_xlabel("time on gloo / time on shm (red: target)")
        axis.set_title(f"{ranks} ranks", loc="left", fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
