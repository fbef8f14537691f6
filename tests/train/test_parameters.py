import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidist.parameters import (
    Box,
    ParamSpec,
    check_specs_match_parameters,
    flat_boxes,
    global_name,
    named_parameters,
    replicated_specs,
)

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def flat_ranges(draw):
    shape = draw(shapes)
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(start, total))


@given(flat_ranges())
def test_flat_boxes_cover_exactly_the_range_in_memory_order(given_range):
    shape, start, stop = given_range
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    assert [int(x) for box in boxes for x in whole[box.slices].ravel()] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_the_intersection_of_boxes_is_that_of_their_elements(shape, data):
    def draw_box():
        ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def marked(box):
        mask = np.zeros(shape, bool)
        mask[box.slices] = True
        return mask

    a, b = draw_box(), draw_box()
    shared = a.intersect(b)
    both = marked(a) & marked(b)
    if shared is None:
        assert not both.any()
    else:
        assert (marked(shared) == both).all()
        whole = np.arange(math.prod(shape)).reshape(shape)
        assert (whole[a.slices][shared.slices_in(a)] == whole[shared.slices]).all()


def test_a_box_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match=r"no box from \(2,\) to \(1,\)"):
        Box((2,), (1,))
    with pytest.raises(ValueError, match="elements 3 to 9 are not inside .*6 elements"):
        flat_boxes((2, 3), 3, 9)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_a_tied_parameter_is_one_entry():
    specs = replicated_specs(Tied(), (0, 1))
    assert list(specs) == ["first.weight", "second.bias"]
    assert specs["first.weight"].boxes == (Box((0, 0), (3, 3)),)


def test_specs_match_after_copies_meta_device_and_wrappers():
    model = Tied()
    specs = replicated_specs(model, (0, 1))
    moved = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    moved.load_state_dict(model.state_dict(), assign=True)
    check_specs_match_parameters(copy.deepcopy(model), specs)
    check_specs_match_parameters(
        moved, {**specs, "second.weight": specs["first.weight"]}
    )  # torch unties what it assigns
    check_specs_match_parameters(torch.compile(model, backend="eager"), specs)
    assert set(named_parameters(torch.compile(model, backend="eager"))) == set(specs)
    assert global_name("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"


def test_a_parameter_without_a_matching_spec_is_an_error():
    specs = replicated_specs(Tied(), (0,))
    del specs["second.bias"]
    with pytest.raises(KeyError, match="second.bias has no ParamSpec"):
        check_specs_match_parameters(Tied(), specs)
    specs["second.bias"] = ParamSpec("second.bias", (3,), (Box((0,), (2,)),), (0,))
    with pytest.raises(KeyError, match="second.bias holds 3 elements here, its ParamSpec says 2"):
        check_specs_match_parameters(Tied(), specs)


def test_owners_are_replicas_and_spread_over_them():
    names = [f"layers.{i}.weight" for i in range(200)]
    owners = [ParamSpec(name, (1,), (Box((0,), (1,)),), (3, 5)).owner for name in names]
    assert set(owners) == {3, 5}
    # 200 fair coins: 4 standard deviations are 28.
    assert abs(owners.count(3) - 100) <= 28
