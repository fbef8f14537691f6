"""The diagram of groups on nodes counts the groups that cross a border, draws them in red, and refuses gaps."""

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.tools.notebook import bytes_across_nodes, plot_groups_on_nodes
from minidist.tools.notebook.diagrams import rank_color

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

MESH = Mesh(pp=2, dp=2, tp=2)
NEIGHBOURS = [(0, 1), (2, 3), (4, 5), (6, 7)]
IN_TURN = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def patches_of(panel, kind):
    return [patch for patch in panel.patches if isinstance(patch, kind)]


def line_colors(panel):
    return [to_hex(patch.get_edgecolor()) for patch in patches_of(panel, FancyArrowPatch)]


def rank_places(panel):
    """{(x, y): the rank whose number is there}."""
    return {text.get_position(): int(text.get_text()) for text in panel.texts if text.get_text().isdigit()}


def drawn_lines(panel):
    """The pairs of ranks that lines join, with the bend of each line."""
    ranks = rank_places(panel)
    lines = {}
    for line in patches_of(panel, FancyArrowPatch):
        first, second = (ranks[tuple(place)] for place in line._posA_posB)
        lines[first, second] = line.get_connectionstyle().rad
    return lines


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


def test_panels_say_their_axis_their_placement_and_the_colours():
    plot_groups_on_nodes(Mesh(dp=4, tp=2), {"neighbours": NEIGHBOURS, "dealt in turn": IN_TURN}, ["tp", "dp"])
    panels, figure = plt.gcf().axes, plt.gcf()
    assert [panel.get_title() for panel in panels] == ["tp: groups of 2", "dp: groups of 4"] * 2
    assert [panel.get_ylabel() for panel in panels] == ["neighbours", "", "dealt in turn", ""]
    [legend] = figure.legends
    colors = [to_hex(handle.get_color()) for handle in legend.get_lines()]
    assert dict(zip(colors, (text.get_text() for text in legend.get_texts()), strict=True)) == {
        to_hex("C2"): "group inside a node",
        to_hex("C3"): "group across nodes",
    }


@pytest.mark.parametrize("nodes", [NEIGHBOURS, IN_TURN, [(0, 1, 2), (3, 4, 5), (6, 7)]], ids=str)
def test_ranks_are_drawn_inside_their_node_with_their_colour(nodes):
    plot_groups_on_nodes(MESH, {"a": nodes}, ["tp"])
    [panel] = plt.gcf().axes
    ranks, found = rank_places(panel), []
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    for box in patches_of(panel, FancyBboxPatch):
        ends = box.get_x() + box.get_width(), box.get_y() + box.get_height()
        assert left < box.get_x() and ends[0] < right and top < box.get_y() and ends[1] < bottom
        inside = [rank for (x, y), rank in ranks.items() if box.get_x() < x < ends[0] and box.get_y() < y < ends[1]]
        found.append(tuple(sorted(inside)))
    assert found == nodes
    names = [text.get_text() for text in panel.texts if not text.get_text().isdigit()]
    assert names == [f"node {number}" for number in range(len(nodes))]
    squares = {tuple(patch.get_center()): to_hex(patch.get_facecolor()) for patch in patches_of(panel, Rectangle)}
    for place, color in squares.items():
        [rank] = [rank for at, rank in ranks.items() if at == pytest.approx(place)]
        assert color == to_hex(rank_color(rank))
    assert len(squares) == 8


def test_lines_join_the_ranks_of_a_group_in_order():
    plot_groups_on_nodes(Mesh(dp=4, tp=2), {"a": NEIGHBOURS}, ["tp", "dp"])
    tensor, data = plt.gcf().axes
    assert set(drawn_lines(tensor)) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert set(drawn_lines(data)) == {(0, 2), (2, 4), (4, 6), (1, 3), (3, 5), (5, 7)}


def test_a_line_bends_around_the_ranks_between_its_ends():
    plot_groups_on_nodes(Mesh(dp=2, tp=2), {"a": [(0, 1, 2, 3)]}, ["tp", "dp"])
    tensor, data = plt.gcf().axes
    assert drawn_lines(tensor) == {(0, 1): 0, (2, 3): 0}
    bends = drawn_lines(data)
    assert bends[0, 2] * bends[1, 3] < 0  # one above and one below, so that the two lines stay apart


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
