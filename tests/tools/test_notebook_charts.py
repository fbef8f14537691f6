"""Charts draw the ranks' measurements, count shared storages once, and refuse empty data."""

import matplotlib
import pytest
import torch

from minidist.errors import UserError
from minidist.tools.notebook import LiveRanks, compare_memory, memory_by_category, plot_losses, plot_memory

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def trained(size=3):
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(size)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_every_part_of_training_is_counted_in_bytes():
    model, optimizer = trained()
    one = 4 * (9 + 3)
    assert memory_by_category(model, optimizer) == {"parameters": one, "gradients": one, "optimizer state": one}
    assert memory_by_category(model)["gradients"] == one
    model.zero_grad()
    assert memory_by_category(model) == {"parameters": one}


def test_memory_that_is_shared_counts_once():
    flat = torch.zeros(10)
    assert memory_by_category(first=flat[:5], second=[flat[5:], {"own": torch.zeros(2)}]) == {"first": 40, "second": 8}
    model, _ = trained()
    assert memory_by_category(model, again=list(model.parameters())) == {"parameters": 48, "gradients": 48, "again": 0}


def test_bars_are_the_ranks_bytes(server):
    with LiveRanks(2, server=server) as live:
        live.run(
            "from minidist.tools.notebook import memory_by_category\nmodel = torch.nn.Linear(2 + rank, 1, bias=False)"
        )
        held = plot_memory(live.get("memory_by_category(model, extra=torch.ones(rank))"))
    assert held == [{"parameters": 8, "extra": 0}, {"parameters": 12, "extra": 4}]
    axes = plt.gcf().axes[0]
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[8, 12], [0, 4]]
    assert [bar.get_y() for bar in axes.containers[1]] == [8, 12]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["parameters", "extra"]
    assert "16 B" in [text.get_text() for text in axes.texts]


def test_a_part_that_only_some_ranks_have_is_drawn():
    assert plot_memory([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]
    assert [bar.get_height() for bar in plt.gcf().axes[0].containers[1]] == [0, 2]


def test_estimates_are_drawn_beside_measurements():
    drawn = compare_memory([{"a": 10, "b": 4}, {"a": 6}], [{"a": 9}, {"c": 3, "a": 6}])
    assert drawn == {"measured": [{"a": 10, "b": 4}, {"a": 6}], "estimated": [{"a": 9}, {"c": 3, "a": 6}]}
    axes = plt.gcf().axes[0]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[10, 6], [4, 0], [0, 0], [9, 6], [0, 0], [0, 3]]  # a, b, c of one, then of the other
    measured, estimated = axes.containers[:3], axes.containers[3:]
    for one, other in zip(measured, estimated, strict=True):
        assert (
            one[0].get_facecolor()[:3] == other[0].get_facecolor()[:3]
            and not one[0].get_hatch()
            and other[0].get_hatch()
        )
        assert [bar.get_x() + bar.get_width() for bar in one] == pytest.approx([bar.get_x() for bar in other])
    assert [bar.get_y() for bar in estimated[2]] == [9, 6]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c"]
    assert {"measured\n14 B", "estimated\n9 B"} <= {text.get_text() for text in axes.texts}


def test_difference_curves_against_one_process():
    curves = plot_losses({"2 ranks": torch.tensor([3.0, 2.0]), "4 ranks": [3, 2.5, 2]}, [3.0, 2.5])
    assert curves == {"one process": [3.0, 2.5], "2 ranks": [3.0, 2.0], "4 ranks": [3.0, 2.5, 2.0]}
    lines = plt.gcf().axes[0].get_lines()
    assert {line.get_label(): list(line.get_ydata()) for line in lines} == curves
    assert lines[0].get_linewidth() > lines[1].get_linewidth()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_memory([]), "no memory to draw"),
        (lambda: plot_memory([{}, {"a": 0}]), "no memory to draw"),
        (lambda: compare_memory([], []), "nothing was measured or estimated"),
        (lambda: compare_memory([{"a": 1}], [{"a": 0}]), "nothing was estimated"),
        (lambda: compare_memory([{"a": 1}], []), "measured is of 1 rank and estimated of 0: give as many of both"),
        (lambda: plot_losses({}, [1.0]), "no run has none"),
        (lambda: plot_losses({"2 ranks": []}, [1.0]), "2 ranks has none"),
        (lambda: plot_losses({"2 ranks": [1.0]}, []), "one process has none"),
        (lambda: plot_losses({"2 ranks": [1.0, float("nan")]}, [1.0]), "2 ranks are not all finite"),
    ],
)
def test_an_empty_chart_is_an_error(draw, message):
    before = plt.get_fignums()  # figures of earlier tests in this process
    with pytest.raises(UserError, match=message):
        draw()
    assert plt.get_fignums() == before
