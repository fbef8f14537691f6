"""Curves and fields of costs draw the data given; an empty picture is an error."""

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.tools.notebook import compare_curves, plot_winners

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def test_predictions_are_lines_and_measurements_dots_of_their_colour():
    predicted = {"ring": [(1, 2.0), (10, 3.0)], "tree": [(1, 4.0), (10, 8.0)]}
    drawn = compare_curves(predicted, {"tree": [(1, 5.0)], "gloo": [(10, 1.0)]}, level=2.5)
    assert drawn == {"predicted": predicted, "measured": {"tree": [(1, 5.0)], "gloo": [(10, 1.0)]}}
    [axes] = plt.gcf().axes
    ring, tree, dots, gloo, level = axes.lines
    assert ring.get_xydata().tolist() == [[1, 2], [10, 3]] and tree.get_xydata().tolist() == [[1, 4], [10, 8]]
    assert dots.get_color() == tree.get_color() != ring.get_color() and dots.get_linestyle() == "None"
    assert gloo.get_xydata().tolist() == [[10, 1]] and list(level.get_ydata()) == [2.5, 2.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "tree", "gloo"]
    assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize(
    "points, told",
    [({}, "no curve"), ({"ring": []}, "ring has no points"), ({"ring": [(0, 1)]}, "ring are not all above 0")],
)
def test_curves_without_points_are_an_error(points, told):
    with pytest.raises(UserError, match=told):
        compare_curves(points)
    with pytest.raises(UserError, match="nan|above 0"):
        compare_curves({"ring": [(1, float("nan"))]}, draw=False)


def test_each_field_has_the_colour_of_its_winner():
    rows = {2: ["tree", "ring"], 8: ["tree", "tree"]}
    assert plot_winners(rows, [10, 1000], {8: [(10, "ring"), (1000, "naive")]}) == rows
    [axes] = plt.gcf().axes
    mesh, dots = axes.collections
    assert mesh.get_array().ravel().tolist() == [0, 1, 0, 0]
    assert dots.get_offsets().tolist() == [[10, 1], [1000, 1]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tree", "ring", "naive"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "8"]


def test_names_may_have_their_colours_beforehand():
    plot_winners({2: ["ring"]}, [1], names=["naive", "ring"])
    [axes] = plt.gcf().axes
    assert axes.collections[0].get_array().ravel().tolist() == [1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["naive", "ring"]


@pytest.mark.parametrize("rows, sizes", [({}, [1]), ({2: []}, []), ({2: ["a"], 4: ["a", "b"]}, [1, 2])])
def test_fields_without_a_winner_are_an_error(rows, sizes):
    with pytest.raises(UserError, match="nothing to draw|2 sizes, but the row of 2 ranks has 1 names"):
        plot_winners(rows, sizes)
