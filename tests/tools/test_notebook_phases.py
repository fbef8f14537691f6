"""Plots of failing runs draw the data given and return it; an empty picture is an error."""

import matplotlib
import pytest

from minidist.errors import UserError
from minidist.parameters import Box
from minidist.tools.notebook import plot_loss_differences, plot_outcomes, plot_phases, plot_resharding
from minidist.tools.simulate.failures import Phase

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def test_phases_are_bars_at_their_times_with_one_colour_for_each_kind():
    rows = {"a": [Phase("useful work", 0, 3), Phase("lost work", 3, 4)], "b": [Phase("useful work", 1, 2)]}
    assert plot_phases(rows) == {"a": {"useful work": 3, "lost work": 1}, "b": {"useful work": 1}}
    [axes] = plt.gcf().axes
    bars = [bar for bar in axes.collections if bar.get_paths()]
    spans = [[(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bar.get_paths()] for bar in bars]
    assert spans == [[(0, 3)], [(3, 4)], [(1, 2)]]
    work, lost, other = [tuple(bar.get_facecolor()[0]) for bar in bars]
    assert work == other != lost
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["useful work", "lost work"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_a_part_of_the_step_has_one_colour_in_every_figure_and_no_other_kind_has_it():
    kinds = ("shard", "backward", "forward", "buffer")
    rows = [{"a": [Phase(kind, at, at + 1) for at, kind in enumerate(order)]} for order in (kinds, kinds[::-1])]
    colors = []
    for drawn in rows:
        plot_phases(drawn)
        [axes] = plt.gcf().axes
        colors.append({bar.get_label(): tuple(bar.get_facecolor()[0]) for bar in axes.collections})
    assert all(len(set(of_figure.values())) == len(kinds) for of_figure in colors)
    assert all(colors[0][kind] == colors[1][kind] for kind in ("forward", "backward"))


def test_outcomes_are_fields_with_one_colour_for_each_outcome():
    rows = {"naive": ["old", "none", "new"], "atomic": ["old", "old", "new"]}
    assert plot_outcomes(rows, ["0 %", "50 %", "100 %"], "killed after") == rows
    [axes] = plt.gcf().axes
    colors = [tuple(field.get_facecolor()[0]) for field in axes.collections]
    assert colors[0] == colors[3] == colors[4] and colors[2] == colors[5]
    assert len(set(colors)) == 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["old", "none", "new"]


def test_outcomes_may_have_their_colours_beforehand():
    plot_outcomes({"a": ["bad"]}, [1], "step", {"good": "C0", "bad": "C3"})
    [axes] = plt.gcf().axes
    assert tuple(axes.collections[0].get_facecolor()[0]) == to_rgba("C3")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["good", "bad"]


def test_resharding_returns_every_slice_that_a_rank_reads():
    saved = [Box((0, 0), (4, 3)), Box((0, 3), (4, 6))]
    loading = [Box((0, 0), (1, 6)), Box((1, 0), (4, 2))]
    reads = plot_resharding(saved, loading)
    assert reads == [(0, 0, Box((0, 0), (1, 3))), (0, 1, Box((0, 3), (1, 6))), (1, 0, Box((1, 0), (4, 2)))]
    left, right = plt.gcf().axes
    assert len(left.patches) == 2 and len(right.patches) == len(reads) + len(loading)
    assert [text.get_text() for text in right.texts if text.get_text()] == ["0 to 0", "1 to 0", "0 to 1"]


def test_differences_of_losses_are_drawn_and_an_exact_run_is_said_to_be_exact():
    drawn = plot_loss_differences({"same": {1: 2.0, 2: 1.0}, "other": {2: 1.5}}, [3.0, 2.0, 1.0])
    assert drawn == {"same": {1: 0.0, 2: 0.0}, "other": {2: 0.5}}
    [axes] = plt.gcf().axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[], [[2, 0.5]]]
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["same: exactly 0 in all 2 steps", "other"]


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plot_phases({}), "no row has none"),
        (lambda: plot_phases({"a": []}), "a has none"),
        (lambda: plot_outcomes({}, ["x"], "x"), "no row"),
        (lambda: plot_outcomes({"a": ["ok"]}, ["x", "y"], "x"), "2 columns, but the row a has 1 outcomes"),
        (lambda: plot_resharding([Box((0, 0), (4, 3))], []), "nothing to draw"),
        (lambda: plot_resharding([Box((0,), (4,))], [Box((0,), (2,))]), "1 boxes are read"),
        (lambda: plot_loss_differences({}, [1.0]), "no run has none"),
        (lambda: plot_loss_differences({"a": {}}, [1.0]), "a has none"),
        (lambda: plot_loss_differences({"a": {1: 1.0}}, [1.0]), "steps that the reference"),
        (lambda: plot_loss_differences({"a": {0: float("nan")}}, [1.0]), "not all finite"),
    ],
)
def test_an_empty_picture_is_an_error(draw, message):
    with pytest.raises(UserError, match=message):
        draw()
