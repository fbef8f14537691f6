"""loss.png: the losses of a run beside those of n-gram models."""

from pathlib import Path

_LABEL_HEIGHT = 0.055  # of the axes


def draw_loss(rows: list[dict], baselines: dict[str, float], path: Path) -> dict[str, list[tuple[int, float]]]:
    """Plot training and held-out loss over steps into an image file, with a horizontal line per baseline.

    rows: the rows of metrics.jsonl. baselines: losses in nats per token, by name. path: the image file to write.
    Returns the plotted points (step, loss) of each curve, by the curve's name.
    """
    from matplotlib.figure import Figure  # not pyplot, which would change a notebook's backend

    curves = {
        name: [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        for name, key in (("training", "loss"), ("held out", "held_out_loss"))
    }
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    for (name, points), style in zip(curves.items(), ("-", "o-"), strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{name}, last {points[-1][1]:.3f}", lw=1.4, ms=4)
    for value, style in zip(baselines.values(), ("--", ":", "-."), strict=False):
        axes.axhline(value, ls=style, color="0.4", lw=1)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    if any(curves.values()):
        axes.legend(loc="upper right", framealpha=1.0)
    low, high = axes.get_ylim()
    for (name, value), height in zip(baselines.items(), place_baseline_labels(baselines, low, high), strict=True):
        axes.text(1.01, height, f"{name} {value:.3f}", transform=axes.transAxes, va="center", fontsize=9)
    figure.savefig(path, bbox_inches="tight")
    return curves


def place_baseline_labels(baselines: dict[str, float], low: float, high: float) -> list[float]:
    """Return a height for the label of each baseline, so that labels do not overlap, in the order of `baselines`.

    baselines: losses by name. low, high: the losses at the bottom and the top of the axes. Heights are fractions of the
    axes, from the bottom.
    """
    heights = {name: (value - low) / (high - low) for name, value in baselines.items()}
    below = float("-inf")
    for name in sorted(heights, key=heights.get):
        heights[name] = below = max(heights[name], below + _LABEL_HEIGHT)
    return list(heights.values())
