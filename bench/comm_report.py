"""The figures of `python -m bench comm`: what was wanted, a table, a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from rich.console import Console
from rich.table import Table

from bench.statistics import Interval

# gloo's time over that of shm, at least.
WANTED = {
    ("all_reduce", 4 * 2**10): 20.0,
    ("all_reduce", 256 * 2**10): 8.0,
    ("all_reduce", 4 * 2**20): 3.0,
    ("all_reduce", 64 * 2**20): 2.5,
    **{(name, size * 2**20): 4.0 for name in ("reduce_scatter", "all_gather") for size in (4, 64)},
    **{("send_recv", size * 2**20): 1.5 for size in (4, 64)},
    ("DDP", 0): 1.1,
    ("FSDP2", 0): 1.4,
}
# shm's all_reduce of 64 MiB over one plain copy of that size by all ranks at once, at most; by number of ranks.
COPIES = {2: 1.5, 4: 2.0}
COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Row:
    """One operation (or step, of 0 bytes) at one size: seconds on each, gloo's time over shm's.

    cpu: the same of the CPU time of all ranks, which a busy machine disturbs less.
    """

    ranks: int
    name: str
    bytes: int
    gloo_s: float
    shm_s: float
    ratio: Interval
    cpu: Interval
    copies: Interval | None = None  # shm's time over that of a plain copy

    @property
    def wanted(self) -> float | None:
        return WANTED.get((self.name, self.bytes))

    @property
    def verdict(self) -> str:
        """ "ok", or what is missed; "" when nothing was asked for."""
        missed = []
        if self.wanted and self.ratio.median < self.wanted:
            missed.append(f"wanted {self.wanted:g}")
        limit = COPIES.get(self.ranks)
        if limit and self.name == "all_reduce" and self.bytes == COPIED_BYTES and self.copies.median > limit:
            missed.append(f"wanted at most {limit:g} copies")
        return "; ".join(missed) or ("ok" if self.wanted else "")


def named_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" if size else "step"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table("ranks", "what", "size", "gloo ms", "shm ms", "gloo / shm [95 %]", "CPU", "shm / copy", "wanted")
    for row in rows:
        table.add_row(
            str(row.ranks),
            row.name,
            named_size(row.bytes),
            f"{row.gloo_s * 1e3:.3f}",
            f"{row.shm_s * 1e3:.3f}",
            f"{row.ratio.median:.2f} [{row.ratio.low:.2f}, {row.ratio.high:.2f}]",
            f"{row.cpu.median:.2f}",
            "" if row.copies is None else f"{row.copies.median:.2f}",
            row.verdict,
        )
    console.print(table)


def draw(rows: Sequence[Row], title: str, path) -> None:
    """A panel per number of ranks: how many times faster, what was wanted as a line across each bar."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({row.ranks for row in rows})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(6.5 * len(counts), 4.8), squeeze=False, layout="constrained"
    )
    for ranks, axis in zip(counts, axes[0], strict=True):
        mine = [row for row in rows if row.ranks == ranks]
        names = [f"{row.name} {named_size(row.bytes)}" for row in mine]
        axis.barh(names, [row.ratio.median for row in mine], color="#4c72b0")
        for at, row in enumerate(mine):
            axis.text(row.ratio.median, at, f" {row.ratio.median:.1f}", va="center", fontsize=8)
            if row.wanted:
                axis.plot([row.wanted] * 2, [at - 0.4, at + 0.4], color="#c44e52")
        axis.axvline(1.0, color="#777777", linewidth=1)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.set_xlabel("time on gloo / time on shm (red: wanted)")
        axis.set_title(f"{ranks} ranks", loc="left", fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
