"""The run folder: config.toml, metrics.jsonl, loss.png and checkpoints/. Only rank 0 writes here, checkpoints apart."""

import json
import os
from pathlib import Path

from minidist.config import Config
from minidist.configfile import to_toml
from minidist.errors import UserError
from minidist.fault import folders

CHECKPOINTS = "checkpoints"


def choose(config: Config) -> Path:
    """The folder of this run: the one asked for, that of the run to resume, or the next free `runs/0001`.

    Raises UserError when a new run would write into the folder of another one. Nothing is created yet.
    """
    resume = config.checkpoint.resume
    if config.folder is None and resume is not None:
        return run_of(folders.latest(checkpoints_of(resume)))
    if config.folder is None:
        taken = [int(path.name) for path in Path("runs").glob("[0-9]*") if path.name.isdigit()]
        return Path("runs") / f"{max(taken, default=0) + 1:04d}"
    folder = Path(config.folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {folder} is a file; give a folder that does not exist yet.")
    if resume is None and folder.is_dir() and any(folder.iterdir()):
        held = sorted(path.name for path in folder.iterdir())
        what = (
            f"to go on from it give --checkpoint.resume {folder}" if CHECKPOINTS in held else "it is not a run folder"
        )
        raise UserError(
            f"--folder {folder} is not empty (it holds {', '.join(held[:4])}): {what}; "
            "a new run needs a folder of its own."
        )
    return folder


def checkpoints_of(path: str | Path) -> Path:
    """Where to look for checkpoints, given a run folder, its checkpoints folder, or one checkpoint."""
    inner = Path(path) / CHECKPOINTS
    return inner if inner.is_dir() else Path(path)


def run_of(checkpoint: Path) -> Path:
    """The run folder a checkpoint lies in; beside it when it lies somewhere else."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == CHECKPOINTS else parent


class Metrics:
    """metrics.jsonl: one JSON object per line, appended and flushed.

    A run that goes on from step `start` drops the lines of later steps, which it is about to write again.
    """

    def __init__(self, folder: Path, config: Config, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.rows = [row for row in read_metrics(self.path) if row["step"] <= start] if start else []
        _replace(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        _replace(folder / "config.toml", to_toml(config))

    def write(self, row: dict) -> None:
        self.rows.append(row)
        with self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics file; a last line that a crash cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _replace(path: Path, text: str) -> None:
    """Write a file aside and give it its name, so that a reader never sees half of it."""
    aside = path.with_suffix(path.suffix + ".partial")
    aside.write_text(text)
    os.replace(aside, path)


def draw_loss(rows: list[dict], lines: dict[str, float], path: Path) -> dict[str, list[tuple[int, float]]]:
    """loss.png: training and held-out loss over steps, and horizontal lines to compare with. Returns what it drew."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = {
        name: [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        for name, key in (("training", "loss"), ("held out", "held_out_loss"))
    }
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for (name, points), style in zip(curves.items(), ("-", "o-"), strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{name}: {points[-1][1]:.3f}", lw=1.4, ms=4)
    for (name, value), style in zip(lines.items(), ("--", ":", "-."), strict=False):
        axes.axhline(value, ls=style, color="0.4", lw=1)
        axes.text(
            1.0,
            value,
            f"{name} {value:.3f} ",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return curves
