"""The diagram of groups on nodes counts the groups that cross a border, draws them in red, and refuses gaps."""

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.tools.notebook import bytes_across_nodes, plot_groups_on_nodes

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

MESH = Mesh(pp=2, dp=2, tp=2)
NEIGHBOURS = [(0, 1), (2, 3), (4, 5), (6, 7)]
IN_TURN = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def line_colors(panel):
    return [to_hex(patch.get_edgecolor()) for patch in panel.patches if isinstance(patch, FancyArrowPatch)]


def test_groups_that_cross_a_border_are_counted_and_red():
    placements = {"neighbours": NEIGHBOURS, "dealt in turn": IN_TURN}
    assert plot_groups_on_nodes(MESH, placements, ["tp", "pp"]) == {
        "neighbours": {"tp": 0, "pp": 4},
        "dealt in turn": {"tp": 4, "pp": 0},
    }
    inside, across = to_hex("C2"), to_hex("C3")
    panels = plt.gcf().axes
    assert [set(line_colors(panel)) for panel in panels] == [{inside}, {across}, {across}, {inside}]
    assert all(len(line_colors(panel)) == 4 for panel in panels)
    assert all(
        sorted(t.get_text() for t in panel.texts if t.get_text().isdigit()) == list("01234567") for panel in panels
    )


def test_a_group_on_two_of_three_nodes_crosses():
    drawn = plot_groups_on_nodes(Mesh(dp=2, tp=3), {"one": [(0, 1, 2, 3), (4, 5)]}, ["tp", "dp"], draw=False)
    assert drawn == {"one": {"tp": 1, "dp": 2}}
    assert not plt.get_fignums()


@pytest.mark.parametrize("nodes", [[(0, 1), (2, 3), (4, 5)], [*NEIGHBOURS, (0,)], []])
def test_a_placement_without_each_rank_once_is_refused(nodes):
    with pytest.raises(UserError, match="each rank from 0 to 7 once"):
        plot_groups_on_nodes(MESH, {"odd": nodes}, ["tp"])


@pytest.mark.parametrize(("placements", "axes"), [({}, ["tp"]), ({"a": NEIGHBOURS}, [])])
def test_nothing_to_draw_is_refused(placements, axes):
    with pytest.raises(UserError, match="nothing to draw"):
        plot_groups_on_nodes(MESH, placements, axes)


def test_only_bytes_between_ranks_of_different_nodes_count():
    matrix = [[0, 1, 2, 4], [8, 0, 16, 32], [64, 128, 0, 256], [512, 1024, 2048, 0]]
    assert bytes_across_nodes(matrix, [(0, 1), (2, 3)]) == 2 + 4 + 16 + 32 + 64 + 128 + 512 + 1024
    assert bytes_across_nodes(matrix, [(0, 1, 2, 3)]) == 0
