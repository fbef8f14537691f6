"""Flat parameters cut into equal shards: every element has one owner, and unsharded tensors stay unsharded."""

from hypothesis import given
from hypothesis import strategies as st

from minidist.zero.plan import lay_out_flat

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda sizes: {f"p{i}": n for i, n in enumerate(sizes)}
)
PARTS = st.integers(1, 8)


@given(SIZES, PARTS)
def test_every_element_of_every_parameter_is_in_one_shard(sizes, parts):
    layout = lay_out_flat(sizes, parts)
    seen = {name: [0] * numel for name, numel in sizes.items()}
    for part in range(parts):
        for name, (start, stop) in layout.held(part).items():
            for i in range(start, stop):
                seen[name][i] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(SIZES, PARTS)
def test_no_two_parameters_share_an_element_of_the_row(sizes, parts):
    layout = lay_out_flat(sizes, parts)
    taken = [i for slot in layout.slots.values() for i in range(slot.start, slot.stop)]
    assert taken == list(range(sum(sizes.values()))), "padding is at the end only"
    assert sum(sizes.values()) <= layout.numel


@given(SIZES, PARTS)
def test_a_row_is_as_short_as_equal_shards_allow(sizes, parts):
    layout = lay_out_flat(sizes, parts)
    assert layout.numel == parts * layout.shard
    assert 0 <= layout.padding < parts
    assert layout.padding == layout.numel - sum(layout.held_numel(part) for part in range(parts))


def test_shards_are_the_same_pieces_of_a_row_on_all_ranks():
    layout = lay_out_flat({"a": 5, "b": 4, "c": 1}, 3)
    assert (layout.shard, layout.numel, layout.padding) == (4, 12, 2)
    assert [layout.held(part) for part in range(3)] == [
        {"a": (0, 4)},
        {"a": (4, 5), "b": (0, 3)},
        {"b": (3, 4), "c": (0, 1)},
    ]
    assert lay_out_flat({"a": 1}, 3).held(2) == {}
