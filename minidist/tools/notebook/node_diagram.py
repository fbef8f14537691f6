"""Diagram of the groups of a mesh on the nodes of a cluster (`plot_groups_on_nodes`): which groups cross a border.

It draws unless `draw` is False, and returns the data that it draws, as in `diagrams.py`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.tools.notebook.diagrams import rank_color

_NODES_PER_ROW = 2
_INSIDE, _ACROSS = "C2", "C3"  # colours of group lines


def plot_groups_on_nodes(
    mesh: Mesh,
    placements: Mapping[str, Sequence[Sequence[int]]],
    axes: Sequence[str],
    draw: bool = True,
) -> dict[str, dict[str, int]]:
    """Draw the groups along each axis of a mesh as lines between ranks on nodes; return how many cross a node's border.

    placements: the ranks of each node, by the placement's name; each placement is a row of panels. axes: mesh axes such
    as "tp"; each is a column. A green line is a group inside a node, a red line a group across nodes. Returns
    {placement: {axis: number of groups across nodes}}. Raises UserError if there is no placement or no axis, or a
    placement does not have each rank of the mesh once.
    """
    if not placements or not axes:
        raise UserError("there is nothing to draw: no placement, or no axis")
    for name, nodes in placements.items():
        if sorted(rank for node in nodes for rank in node) != list(range(mesh.world_size)):
            raise UserError(f"the nodes of {name!r} do not have each rank from 0 to {mesh.world_size - 1} once")
    if draw:
        _draw_panels(mesh, placements, axes)
    return {
        name: {axis: sum(_crosses_border(group, nodes) for group in mesh.rank_groups([axis])) for axis in axes}
        for name, nodes in placements.items()
    }


def bytes_across_nodes(matrix: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> int:
    """Return the bytes sent between ranks of different nodes.

    matrix: the bytes from each rank to each other rank, one row per sender. nodes: the ranks of each node.
    """
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    return sum(
        count
        for sender, row in enumerate(matrix)
        for receiver, count in enumerate(row)
        if node_of[sender] != node_of[receiver]
    )


def _crosses_border(group: Sequence[int], nodes: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks of a group are on more than one node."""
    return not any(set(group) <= set(node) for node in nodes)


def _draw_panels(mesh: Mesh, placements: Mapping[str, Sequence[Sequence[int]]], axes: Sequence[str]) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    figure, all_panels = plt.subplots(
        len(placements), len(axes), figsize=(3.2 * len(axes), 0.5 + 2.1 * len(placements)), squeeze=False
    )
    for row, (name, nodes) in zip(all_panels, placements.items(), strict=True):
        for panel, axis in zip(row, axes, strict=True):
            _draw_nodes(panel, mesh, nodes, axis)
            panel.set_title(f"{axis}: groups of {mesh.sizes[axis]}", fontsize=10)
        row[0].set_ylabel(name, fontsize=10)
    figure.legend(
        handles=[
            Line2D([], [], color=_INSIDE, linewidth=4, label="group inside a node"),
            Line2D([], [], color=_ACROSS, linewidth=4, label="group across nodes"),
        ],
        loc="lower center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))


def _draw_nodes(panel, mesh: Mesh, nodes: Sequence[Sequence[int]], axis: str) -> None:
    """Draw the nodes of a placement with their ranks, and a line along each group of `axis`."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

    per_node = max(map(len, nodes))
    places = {}
    for number, node in enumerate(nodes):
        down, right = divmod(number, _NODES_PER_ROW)
        left, top = right * (per_node + 0.9), down * 1.9
        box = FancyBboxPatch((left - 0.5, top - 0.5), per_node, 1.0, boxstyle="round,pad=0.12", fc="0.95", ec="0.5")
        panel.add_patch(box)
        middle = left - 0.5 + per_node / 2
        panel.text(middle, top - 0.68, f"node {number}", fontsize=7, color="0.3", ha="center", va="bottom")
        places |= {rank: (left + at, top) for at, rank in enumerate(node)}
    for group in mesh.rank_groups([axis]):
        color = _ACROSS if _crosses_border(group, nodes) else _INSIDE
        for first, second in pairwise(places[rank] for rank in group):
            is_over_others = first[1] == second[1] and abs(second[0] - first[0]) > 1.5
            bend = 0.3 * (-1) ** int(first[0]) if is_over_others else 0.0  # around the ranks between the two
            line = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={bend}", "color": color, "linewidth": 3.5}
            panel.add_patch(FancyArrowPatch(first, second, shrinkA=0, shrinkB=0, zorder=2, **line))
    for rank, (x, y) in places.items():
        panel.add_patch(Rectangle((x - 0.27, y - 0.27), 0.54, 0.54, fc=rank_color(rank), ec="0.25", zorder=3))
        panel.text(x, y, str(rank), ha="center", va="center", fontsize=9, zorder=4)
    rows = -(-len(nodes) // _NODES_PER_ROW)
    panel.set(xlim=(-0.75, 2 * per_node + 0.65), ylim=(1.9 * rows - 0.95, -1.15), xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
