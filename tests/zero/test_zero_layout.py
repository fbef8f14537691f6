"""FlatLayout of flat parameters: consecutive parameters, minimal padding, equal shards, every element in one shard."""

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
        for name, (start, stop) in layout.param_ranges(part).items():
            for i in range(start, stop):
                seen[name][i] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(SIZES, PARTS)
def test_parameters_are_consecutive_in_the_flat_parameter(sizes, parts):
    layout = lay_out_flat(sizes, parts)
    taken = [i for slot in layout.slots.values() for i in range(slot.start, slot.stop)]
    assert taken == list(range(sum(sizes.values()))), "padding is at the end only"
    assert sum(sizes.values()) <= layout.numel


@given(SIZES, PARTS)
def test_padding_is_as_small_as_equal_shards_allow(sizes, parts):
    layout = lay_out_flat(sizes, parts)
    assert layout.numel == parts * layout.shard_numel
    assert 0 <= layout.padding < parts
    assert layout.padding == layout.numel - sum(layout.unpadded_numel(part) for part in range(parts))


def test_each_rank_holds_its_slice_of_the_flat_parameter():
    layout = lay_out_flat({"a": 5, "b": 4, "c": 1}, 3)
    assert (layout.shard_numel, layout.numel, layout.padding) == (4, 12, 2)
    assert [layout.param_ranges(part) for part in range(3)] == [
        {"a": (0, 4)},
        {"a": (4, 5), "b": (0, 3)},
        {"b": (3, 4), "c": (0, 1)},
    ]
    assert lay_out_flat({"a": 1}, 3).param_ranges(2) == {}
