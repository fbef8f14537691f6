"""Diagrams draw the data given and return it; an empty or impossible one is an error."""

import matplotlib
import pytest
import torch

from minidist.comm import Record
from minidist.errors import UserError
from minidist.tools.notebook.diagrams import (
    Cell,
    Transfer,
    contributions,
    plot_cells,
    plot_transfers,
    rank_color,
    transfers_by_round,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def filled(axes):
    """The colours of the stripes, in the order in which they were drawn."""
    return [patch.get_facecolor()[:3] for patch in axes.patches if patch.get_fill()]


def test_a_cell_has_a_stripe_for_each_rank_whose_values_it_contains():
    rows = [[Cell("a", (0,)), None], [None, Cell("sum", (0, 2), "partial", 2.0)]]
    assert plot_cells({"now": rows}) == {"now": rows}
    [axes] = plt.gcf().axes
    assert filled(axes) == [rank_color(0), rank_color(0), rank_color(2)]
    [first, second] = [patch for patch in axes.patches if not patch.get_fill()]
    assert (first.get_hatch(), second.get_hatch()) == (None, "///") and second.get_width() > first.get_width()
    assert [text.get_text() for text in axes.texts] == ["a", "sum"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]


def test_panels_share_the_names_of_rows_and_columns():
    plot_cells({"before": [[Cell()]], "after": [[Cell()]]}, columns=["x"], rows=["node 0"])
    before, after = plt.gcf().axes
    assert [axes.get_title() for axes in (before, after)] == ["before", "after"]
    assert [label.get_text() for label in before.get_yticklabels()] == ["node 0"]
    assert [label.get_text() for axes in (before, after) for label in axes.get_xticklabels()] == ["x", "x"]


def test_contributions_are_read_from_the_binary_digits_of_a_sum():
    assert contributions([[0, 1], [5, 15]]) == [
        [Cell("", ()), Cell("0", (0,))],
        [Cell("0+2", (0, 2)), Cell("0+1+2+3", (0, 1, 2, 3))],
    ]


def test_a_transfer_is_an_arrow_in_its_senders_colour():
    rounds = [[Transfer(0, 1, "a"), Transfer(1, 0)], [Transfer(1, 0, "b")]]
    assert plot_transfers(rounds, 2, "title") == rounds
    [axes] = plt.gcf().axes
    arrows = [text for text in axes.texts if text.get_text() == "" and hasattr(text, "arrow_patch")]
    ends = [(arrow.xyann[0], arrow.xy[0]) for arrow in arrows if arrow.arrow_patch is not None]
    assert ends == [(0, 1), (1, 0), (1, 0)] and axes.get_title() == "title"
    assert [arrow.arrow_patch.get_edgecolor()[:3] for arrow in arrows if arrow.arrow_patch is not None] == [
        rank_color(0),
        rank_color(1),
        rank_color(1),
    ]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_cells({}), "no panel"),
        (lambda: plot_cells({"a": [[None]]}), "all places are empty"),
        (lambda: plot_cells({"a": [[Cell(kind="shared")]]}), "possible are full, partial, transient"),
        (lambda: plot_transfers([[]], 2), "no transfers to draw"),
        (lambda: plot_transfers([[Transfer(0, 2)]], 2), "not between two of 2 ranks"),
    ],
)
def test_an_empty_or_impossible_diagram_is_refused(draw, message):
    with pytest.raises(UserError, match=message):
        draw()


def records_of(*batches):
    """The records of a rank whose batches of (name, peer, number of elements) are waited for one after another."""
    records, clock = [], 0
    for batch in batches:
        for at, (name, peer, elements) in enumerate(batch):
            fixed = ("g", (0, 1, 2, 3), 1, (elements,), torch.float32, 4 * elements, 4 * elements, name, False)
            started = clock + at
            records.append(Record(name, *fixed, peer=peer, launched=started, waited=started + len(batch)))
        clock += 2 * len(batch)
    return records


def test_rounds_follow_from_the_order_of_each_ranks_transfers():
    tree = [
        records_of([("send", 1, 2)], [("send", 2, 3)]),
        records_of([("recv", 0, 2)], [("send", 3, 2)]),
        records_of([("recv", 0, 3)]),
        records_of([("recv", 1, 2)]),
    ]
    assert transfers_by_round(tree) == [[Transfer(0, 1, "2")], [Transfer(0, 2, "3"), Transfer(1, 3, "2")]]


def test_transfers_launched_together_are_in_one_round_and_collectives_are_left_out():
    rounds = [[("send", (rank + 1) % 3, 2), ("recv", (rank - 1) % 3, 2)] for rank in range(3)]
    ring = [records_of([("all_reduce", None, 2)], each, each) for each in rounds]
    assert transfers_by_round(ring) == [[Transfer(r, (r + 1) % 3, "2") for r in range(3)]] * 2


def test_transfers_without_a_counterpart_are_refused():
    with pytest.raises(UserError, match=r"of ranks \[0, 1\] do not match"):
        transfers_by_round([records_of([("send", 1, 2)]), records_of([("send", 0, 2)])])
