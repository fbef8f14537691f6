"""What local steps cost in loss: the stored runs of `python -m bench diloco` against synchronous training."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import minidist
from minidist.errors import UserError

FILE = Path(minidist.__file__).parents[1] / "docs" / "diloco_grid.jsonl"
_T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, by degrees of freedom
Settings = tuple[str, str, int]  # the text, the inner optimizer, and h, the steps between two merges


class Change(NamedTuple):
    """By how much a setting's held-out loss differs from that of synchronous training with the same seed.

    changes: relative, of each seed. outer_lr, outer_momentum: of the outer step. fewer_bytes: how many times as many
    bytes synchronous training sends.
    """

    changes: tuple[float, ...]
    outer_lr: float
    outer_momentum: float
    fewer_bytes: float

    @property
    def mean(self) -> float:
        """The mean of the changes."""
        return mean(self.changes)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval of the mean over the seeds."""
        count = len(self.changes)
        return _T_975[count - 1] * stdev(self.changes) / count**0.5


def read_grid(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the stored runs, one dictionary for each. Raises UserError if there is none."""
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not runs:
        raise UserError(f"{file} has no runs: python -m bench diloco makes them")
    return runs


def best_settings(runs: Iterable[Mapping[str, Any]]) -> dict[Settings, Change]:
    """Return for each text, inner optimizer and h the outer settings with the least mean change of the loss."""
    by_cell: dict[tuple, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for run in runs:
        by_cell[run["text"], run["optimizer"], run["h"], run["outer_lr"], run["outer_momentum"]][run["seed"]] = run
    best: dict[Settings, Change] = {}
    for (text, optimizer, h, outer_lr, momentum), of_seed in by_cell.items():
        if h == 1:
            continue
        plain = by_cell[text, optimizer, 1, None, None]
        changes = tuple(run["held_out_loss"] / plain[seed]["held_out_loss"] - 1 for seed, run in of_seed.items())
        fewer_bytes = mean(plain[seed]["sent_bytes"] / run["sent_bytes"] for seed, run in of_seed.items())
        change = Change(changes, outer_lr, momentum, fewer_bytes)
        known = best.get((text, optimizer, h))
        if known is None or change.mean < known.mean:
            best[text, optimizer, h] = change
    return dict(sorted(best.items()))


def plot_changes(best: Mapping[Settings, Change], draw: bool = True) -> dict[Settings, tuple[float, float]]:
    """Plot the changes with their 95 % intervals, a panel per text; return {settings: (mean, half width)} in percent.

    Raises UserError if there is none.
    """
    if not best:
        raise UserError("there are no changes to draw")
    points = {key: (100 * change.mean, 100 * change.half_width) for key, change in best.items()}
    if draw:
        _draw_changes(points)
    return points


def _draw_changes(points: Mapping[Settings, tuple[float, float]]) -> None:
    from matplotlib import pyplot as plt

    texts = sorted({text for text, _, _ in points}, reverse=True)
    optimizers = sorted({optimizer for _, optimizer, _ in points})
    all_h = sorted({h for _, _, h in points})
    figure, panels = plt.subplots(1, len(texts), figsize=(8, 3), sharey=True, squeeze=False)
    for axes, text in zip(panels[0], texts, strict=True):
        for number, optimizer in enumerate(optimizers):
            places = [place for place, h in enumerate(all_h) if (text, optimizer, h) in points]
            found = [points[text, optimizer, all_h[place]] for place in places]
            axes.errorbar(
                [place + 0.12 * (number - 0.5) for place in places],
                [value for value, _ in found],
                [half_width for _, half_width in found],
                fmt="o",
                capsize=4,
                color=f"C{number}",
                label=f"{optimizer} inside",
            )
        axes.axhline(0, color="0.4", linewidth=1)
        axes.axhline(2, color="0.4", linewidth=1, linestyle="--")
        axes.set(title=f"{text} text", xlim=(-0.5, len(all_h) - 0.5))
        axes.set_xticks(range(len(all_h)), [f"H = {h}" for h in all_h])
    panels[0][0].set_ylabel("loss above synchronous (%)\ndashed: 2 %")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
