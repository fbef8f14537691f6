"""Plots of stale updates, of the paths of replicas that drift, and of an outer step.

Each function draws unless `draw` is False, and returns its data; empty data is an error, as in the notebook's plots.
"""

from collections.abc import Callable, Mapping, Sequence

from minidist.errors import UserError

Point = tuple[float, float]


def plot_staleness(workers: Sequence[int], staleness: Sequence[int], draw: bool = True) -> list[tuple[int, int, int]]:
    """Plot, for each update, how old the parameters of its gradient were; return a tuple of each.

    workers: the worker of each update, in order. staleness: for each update, the number of other updates between the
    worker's pull and its push. A tuple is (worker, number of updates before its pull, number of the update, from 1). A
    line leads from the pull to the push, which makes the update.
    Raises UserError when there is no update, or not one staleness for each.
    """
    if not workers or len(workers) != len(staleness):
        raise UserError(f"{len(workers)} updates and {len(staleness)} values of staleness: give one for each update")
    lines = [(worker, at - late, at + 1) for at, (worker, late) in enumerate(zip(workers, staleness, strict=True))]
    if draw:
        _draw_staleness(lines)
    return lines


def plot_replica_paths(
    rounds: Sequence[Sequence[Sequence[Point]]],
    loss: Callable,
    marks: Mapping[str, Point],
    draw: bool = True,
) -> list[Point]:
    """Plot the paths of replicas with two parameters, over contours of a loss; return where each round starts.

    rounds: by round and replica, the points from the common start of the round to the end of its local steps. loss:
    maps two arrays of coordinates to an array. marks: further points, by their label. Raises UserError when there is no
    round, or the replicas of a round do not have a common start.
    """
    starts = [{path[0] for path in paths} for paths in rounds]
    if not rounds or any(len(points) != 1 for points in starts):
        raise UserError("there is nothing to draw: no round, or a round whose replicas do not start at one point")
    if draw:
        _draw_paths(rounds, loss, marks)
    return [points.pop() for points in starts]


def plot_outer_step(
    paths: Sequence[Sequence[Point]], velocity: Point, lr: float, momentum: float, draw: bool = True
) -> dict[str, Point]:
    """Plot one round of DiLoCo with two parameters: the replicas' inner steps, and the outer step as two arrows.

    paths: by replica, the points from the common start of the round to the end of its inner steps. velocity: before the
    round; the outer step multiplies it by `momentum` and adds the averaged difference of the round. lr, momentum: of
    the outer step. Returns the points "start", "average" (of the ends), "without momentum" (where the outer gradient
    alone leads) and "next start". Raises UserError when there is no path, or the paths do not have a common start.
    """
    if len({path[0] for path in paths}) != 1:
        raise UserError(f"there is nothing to draw: {len(paths)} replicas that do not start at one point")
    start = paths[0][0]
    average = tuple(sum(path[-1][axis] for path in paths) / len(paths) for axis in (0, 1))
    gradient = [start[axis] - average[axis] for axis in (0, 1)]
    velocity = [momentum * velocity[axis] + gradient[axis] for axis in (0, 1)]
    turn = tuple(start[axis] - lr * gradient[axis] for axis in (0, 1))
    end = tuple(turn[axis] - lr * momentum * velocity[axis] for axis in (0, 1))
    points = {"start": start, "average": average, "without momentum": turn, "next start": end}
    if draw:
        _draw_outer_step(paths, points)
    return points


def _draw_staleness(lines: list[tuple[int, int, int]]) -> None:
    from matplotlib import pyplot as plt

    workers = sorted({worker for worker, _, _ in lines})
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(workers)))
    for worker, pulled, pushed in lines:
        axes.plot([pulled, pushed], [worker - 0.15, worker + 0.15], color=f"C{worker}", linewidth=1.5)
        axes.plot(pulled, worker - 0.15, "o", color=f"C{worker}", markersize=5, markerfacecolor="white")
        axes.plot(pushed, worker + 0.15, "o", color=f"C{worker}", markersize=5)
        text = {"ha": "center", "va": "bottom", "fontsize": 8}
        axes.text((pulled + pushed) / 2, worker - 0.05, str(pushed - pulled - 1), **text)
    axes.set(xlabel="number of updates so far", yticks=workers, ylim=(max(workers) + 0.5, -0.6))
    axes.set_yticklabels([f"worker {worker}" for worker in workers])
    axes.set_title("open circle: pull, filled: push; the number is the staleness", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()


def _draw_paths(rounds: Sequence[Sequence[Sequence[Point]]], loss: Callable, marks: Mapping[str, Point]) -> None:
    import numpy as np
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    points = [point for paths in rounds for path in paths for point in path] + list(marks.values())
    x, y = (np.array([point[axis] for point in points]) for axis in (0, 1))
    edges = [(v.min() - 0.12 * np.ptp(v), v.max() + 0.12 * np.ptp(v)) for v in (x, y)]
    grid = np.meshgrid(*(np.linspace(*edge, 80) for edge in edges))
    axes.contour(*grid, loss(*grid), levels=14, colors="0.85", linewidths=0.8)
    for number, paths in enumerate(rounds):
        for replica, path in enumerate(paths):
            label = f"replica {replica}" if number == 0 else None
            axes.plot(*zip(*path, strict=True), ".-", color=f"C{replica}", linewidth=1, markersize=4, label=label)
            if number + 1 < len(rounds):
                merged = rounds[number + 1][0][0]
                axes.plot(*zip(path[-1], merged, strict=True), ":", color=f"C{replica}", linewidth=1)
    axes.plot(*zip(*(paths[0][0] for paths in rounds), strict=True), "ks", markersize=5, label="start of a round")
    for number, (label, point) in enumerate(marks.items()):
        axes.plot(*point, "*X^vP"[number % 5], color=f"C{3 + number}", markersize=10, label=label)
    axes.set(xlabel="first parameter", ylabel="second parameter")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()


def _draw_outer_step(paths: Sequence[Sequence[Point]], points: Mapping[str, Point]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    for replica, path in enumerate(paths):
        color = f"C{replica}"
        axes.plot(*zip(*path, strict=True), ".-", color=color, linewidth=1, label=f"inner steps of replica {replica}")
        axes.plot(*zip(path[-1], points["average"], strict=True), ":", color=color, linewidth=1)
    arrows = [
        ("start", "without momentum", "C3", "outer rate x gradient"),
        ("without momentum", "next start", "C4", "outer rate x momentum x velocity"),
    ]
    for source, target, color, label in arrows:
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2.5, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=points[target], xytext=points[source], arrowprops=arrow)
        axes.plot([], [], color=color, linewidth=2.5, label=label)
    for name, marker in (("start", "ks"), ("average", "ko"), ("next start", "kD")):
        axes.plot(*points[name], marker, markersize=6, markerfacecolor="white", label=name)
    axes.set(xlabel="first parameter", ylabel="second parameter")
    axes.margins(0.08)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
