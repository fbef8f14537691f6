"""Plots of memory by category, of losses, and of differences between losses, measured on the ranks.

Each plot function draws unless `draw` is False, and returns its data; empty data is an error, as in `pictures.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from minidist.errors import UserError, format_count
from minidist.tools.memory.bars import bar_figure_size, draw_memory_bars


def memory_by_category(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **further: object
) -> dict[str, int]:
    """Return the bytes that this rank's tensors occupy, by category.

    The categories are parameters, gradients and buffers of `model`, optimizer state of `optimizer`, and one category
    for each keyword of `further`: a tensor, or nested lists and dicts of tensors. Empty categories of `model` and
    `optimizer` are left out. Tensors that share a storage count once, in their first category.
    """
    parts: dict[str, Iterable] = {}
    if model is not None:
        parameters = list(model.parameters())
        parts |= {"parameters": parameters, "gradients": [p.grad for p in parameters], "buffers": model.buffers()}
    if optimizer is not None:
        parts["optimizer state"] = [optimizer.state[p] for p in optimizer.state]
    seen: set[int] = set()
    counted = {name: sum(_storage_sizes(value, seen)) for name, value in (parts | further).items()}
    return {name: count for name, count in counted.items() if count or name in further}


def plot_memory(by_rank: Sequence[Mapping[str, int]], draw: bool = True) -> list[dict[str, int]]:
    """Plot each rank's memory as a bar stacked by category; return `by_rank` as a list of dicts.

    by_rank: bytes by category for each rank, in rank order, as from `LiveRanks.get` of
    `memory_by_category(model, optimizer)`. Raises UserError when the memory of all ranks is 0.
    """
    held = [dict(parts) for parts in by_rank]
    if not any(count for parts in held for count in parts.values()):
        raise UserError("there is no memory to draw: no rank holds anything")
    if draw:
        _draw_bars({"": held})
    return held


def compare_memory(
    measured: Sequence[Mapping[str, int]], estimated: Sequence[Mapping[str, int]], draw: bool = True
) -> dict[str, list[dict[str, int]]]:
    """Plot each rank's measured peak memory beside its estimated peak memory, whose bars are hatched.

    measured, estimated: bytes by category for each rank, in rank order, as from `tracker.measured_breakdown` and
    `tracker.estimated_breakdown` (minidist.tools.memory). Returns {"measured": measured, "estimated": estimated}.
    Raises UserError when the two have different numbers of ranks, or one of them has no memory at all.
    """
    bars = {"measured": [dict(parts) for parts in measured], "estimated": [dict(parts) for parts in estimated]}
    if len(measured) != len(estimated):
        raise UserError(
            f"measured is of {format_count(len(measured), 'rank')} and estimated of {len(estimated)}: give as many of "
            "both"
        )
    empty = [name for name, held in bars.items() if not any(count for parts in held for count in parts.values())]
    if empty:
        raise UserError(f"there is no memory to draw: nothing was {' or '.join(empty)}")
    if draw:
        _draw_bars(bars)
    return bars


def plot_losses(
    runs: Mapping[str, Sequence[float]], reference: Sequence[float], draw: bool = True
) -> dict[str, list[float]]:
    """Plot the loss curves of runs over the loss curve of a reference run in one process.

    runs: the loss of each step, by the name of the run. reference: the loss of each step in one process. Returns {"one
    process": reference, **runs} with the losses as floats. Raises UserError when there is no run, a curve is empty, or
    a loss is not finite.
    """
    curves = {"one process": reference, **runs}
    curves = {name: [float(loss) for loss in losses] for name, losses in curves.items()}
    empty = [name for name, losses in curves.items() if not losses]
    if len(curves) < 2 or empty:
        raise UserError(f"there are no losses to draw: {' and '.join(empty) or 'no run'} has none")
    if odd := [name for name, losses in curves.items() if not all(map(math.isfinite, losses))]:
        raise UserError(f"the losses of {' and '.join(odd)} are not all finite numbers; a picture would hide it")
    if draw:
        _draw_curves(curves)
    return curves


def plot_loss_differences(
    runs: Mapping[str, Mapping[int, float]], reference: Sequence[float], draw: bool = True
) -> dict[str, dict[int, float]]:
    """Plot the absolute differences between the losses of runs and of a reference run, on a logarithmic axis.

    runs: by the name of the run, its losses by step (from 0); a run need not contain every step of the reference.
    reference: the loss of each step of the reference run. Returns the absolute differences by step, by the name of the
    run. If all losses of a run equal the reference, the legend says so, as 0 has no logarithm. Raises UserError when
    there is no run, a run is empty or has a step that the reference does not have, or a difference is not finite.
    """
    if not runs or (empty := [name for name, losses in runs.items() if not losses]):
        raise UserError(f"there are no losses to compare: {' and '.join(empty) if runs else 'no run'} has none")
    if odd := [name for name, losses in runs.items() if not set(losses) <= set(range(len(reference)))]:
        raise UserError(f"{odd[0]} has steps that the reference, of {len(reference)} steps, has not")
    drawn = {name: {n: abs(loss - reference[n]) for n, loss in losses.items()} for name, losses in runs.items()}
    if odd := [name for name, by_step in drawn.items() if not all(map(math.isfinite, by_step.values()))]:
        raise UserError(f"the losses of {' and '.join(odd)} are not all finite numbers; a picture would hide it")
    if draw:
        _draw_loss_differences(drawn)
    return drawn


def _storage_sizes(value: object, seen: set[int]) -> Iterable[int]:
    """Yield the bytes of each storage in a tensor or in nested lists and dicts of tensors.

    seen: addresses of storages that are skipped; the yielded ones are added.
    """
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _storage_sizes(item, seen)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _storage_sizes(item, seen)


def _draw_bars(bars: Mapping[str, list[dict[str, int]]]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=bar_figure_size(len(next(iter(bars.values()))), len(bars)))
    draw_memory_bars(axes, bars)
    figure.tight_layout()


def _draw_curves(curves: dict[str, list[float]]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    (first, losses), *runs = curves.items()
    axes.plot(losses, color="0.75", linewidth=6, solid_capstyle="round", label=first)
    for number, (name, losses) in enumerate(runs):
        axes.plot(losses, color=f"C{number}", linewidth=1.5, linestyle=(3 * number, (6, 3)), label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()


def _draw_loss_differences(drawn: Mapping[str, Mapping[int, float]]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.8 + 0.2 * len(drawn)))
    for number, (name, by_step) in enumerate(drawn.items()):
        above = {n: difference for n, difference in by_step.items() if difference}
        label = name if above else f"{name}: exactly 0 in all {len(by_step)} steps"
        axes.plot(list(above), list(above.values()), ".-", color=f"C{number}", linewidth=1, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="difference in loss (nats)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8)
    figure.tight_layout()
