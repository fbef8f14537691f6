"""Pictures draw the meters' records; an empty picture is an error."""

import matplotlib
import pytest
import torch

from minidist.comm import Meter
from minidist.comm.wire_bytes import ASSUMED_ALGORITHMS, sent_elements
from minidist.errors import UserError
from minidist.tools.notebook import LiveRanks, plot_timeline, plot_traffic
from minidist.tools.notebook.pictures import Span, assign_lanes

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIZE = 4


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def records(name: str, n: int, root: int = 0, size: int = SIZE, ranks=None) -> list[list]:
    """The meters' records of `size` ranks after one collective over n elements of 4 bytes."""
    meters = [Meter() for _ in range(size)]
    ranks = ranks or tuple(range(size))
    for place, rank in enumerate(ranks):
        meters[rank].record(name, "all", ranks, place, 1, (n,), torch.float32, root=root)
    return [meter.records for meter in meters]


def test_transfers_go_to_their_peer(server):
    with LiveRanks(3, server=server) as live:
        live.run("dist.send(torch.ones(5), 2) if rank == 0 else dist.recv(torch.ones(5), 0) if rank == 2 else None")
        assert plot_traffic(live.last) == [[0, 0, 20], [0, 0, 0], [0, 0, 0]]
        (image,) = plt.gcf().axes[0].images
        assert image.get_array().tolist() == [[0, 0, 20], [0, 0, 0], [0, 0, 0]]


def test_a_ring_feeds_the_next_rank():
    matrix = plot_traffic(records("all_reduce", 8))
    assert matrix == [[0, 48, 0, 0], [0, 0, 48, 0], [0, 0, 0, 48], [48, 0, 0, 0]]
    matrix = plot_traffic(records("all_gather", 8, ranks=(1, 3)))
    assert matrix == [[0] * 4, [0, 0, 0, 16], [0] * 4, [0, 16, 0, 0]]


@pytest.mark.parametrize("root", range(3))
def test_a_tree_begins_at_its_root(root):
    matrix = plot_traffic(records("broadcast", 1, root, size=3), draw=False)
    received = [sum(row[rank] for row in matrix) for rank in range(3)]
    assert received == [0 if rank == root else 4 for rank in range(3)]
    matrix = plot_traffic(records("reduce", 1, root, size=3), draw=False)
    assert [sum(row) for row in matrix] == [0 if rank == root else 4 for rank in range(3)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", sorted(set(ASSUMED_ALGORITHMS) - {"send", "recv", "barrier"}))
def test_every_byte_of_the_meter_is_in_the_matrix_once(name, size):
    n = 3 * size
    matrix = plot_traffic(records(name, n, root=size - 1, size=size), draw=False)
    assert [sum(row) for row in matrix] == [4 * sent_elements(name, n, size, r, root=size - 1) for r in range(size)]
    assert all(matrix[rank][rank] == 0 for rank in range(size))


def test_the_timeline_is_each_ranks_order_of_events(server):
    source = """
a = dist.all_reduce(torch.ones(2), async_op=True)
b = dist.all_reduce(torch.ones(4), async_op=True)
a.wait()
dist.barrier()
"""
    with LiveRanks(2, server=server) as live:
        live.run("dist.barrier()")
        live.run(source)
        spans = plot_timeline(live.last)
    for rows in spans:
        first, second, last = rows
        assert first == ("all_reduce", 0, 2, 8) and second == ("all_reduce", 1, None, 16)
        assert last[:3] == ("barrier", 3, 4)
    axes = plt.gcf().axes[0]
    assert len(axes.collections) == 6
    assert [assign_lanes(rows) for rows in spans] == [[0, 1, 0]] * 2


def test_marks_stand_in_the_same_order_of_events(server):
    source = """
meter.add_event("computed")
work = dist.all_reduce(torch.ones(2), async_op=True)
meter.add_event("computed")
work.wait()
"""
    with LiveRanks(2, server=server) as live:
        live.run("dist.barrier()")
        live.run(source)
        spans = plot_timeline(live.last, live.get("meter.events"))
    assert [[span[:3] for span in rows] for rows in spans] == [[("all_reduce", 1, 3)]] * 2
    marks = {line.get_label(): line.get_xydata().tolist() for line in plt.gcf().axes[0].lines}
    assert marks == {"computed": [[0, 0], [2, 0], [0, 1], [2, 1]]}


def test_concurrent_operations_are_drawn_in_separate_lanes():
    spans = [Span("a", 0, 5, 1), Span("b", 1, 3, 1), Span("c", 2, None, 1), Span("d", 3, 6, 1), Span("e", 5, 7, 1)]
    assert assign_lanes(spans) == [0, 1, 2, 1, 0]


def test_an_empty_picture_is_an_error(server):
    before = plt.get_fignums()  # figures of earlier tests in this process
    with pytest.raises(UserError, match="no traffic"):
        plot_traffic([[], []])
    with pytest.raises(UserError, match="no traffic"):
        plot_traffic(records("barrier", 1))
    with pytest.raises(UserError, match="nothing to draw"):
        plot_timeline([[], []])
    assert plt.get_fignums() == before
