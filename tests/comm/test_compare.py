"""Parity's comparison finds wrong shapes, wrong values and missing tensors, on every rank."""

import math

import pytest
import torch

from minidist.parameters import Box, ParamSpec
from minidist.tools.parity.compare import (
    Comparison,
    has_uncovered_elements,
    relative_difference,
    relative_scalar_difference,
)
from minidist.tools.parity.plan import plan_cases
from minidist.tools.parity.ranks import RankReport
from minidist.tools.parity.run import make_table_row

TOLERANCE = {"loss": 1e-10, "grad": 1e-10, "grad_norm": 1e-10, "param": 1e-10}
CASE = next(
    case for case in plan_cases(2)[1].cases if case.dtype == "float64" and not case.clip and not case.has_own_gradients
)
CLIPPED = next(case for case in plan_cases(2)[1].cases if case.clip)


def spec_of(shape, *boxes):
    return ParamSpec("w", shape, boxes or (Box.whole(shape),), (0, 1))


def reference(*shape):
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).view(shape)


def test_equal_tensors_have_difference_zero():
    assert relative_difference(reference(4, 3), reference(4, 3), spec_of((4, 3))) == 0.0


def test_the_difference_is_relative_to_the_largest_element_of_the_whole_tensor():
    whole = reference(4, 3) * 8
    mine = whole.clone()
    mine[2, 1] += 2.0
    assert relative_difference(mine, whole, spec_of((4, 3))) == pytest.approx(2.0 / 8.0)
    rows = spec_of((4, 3), Box((1, 0), (3, 3)))  # a part without the largest element
    assert relative_difference(mine[1:3], whole, rows) == pytest.approx(2.0 / 8.0)


def test_the_difference_is_absolute_if_the_reference_is_zero():
    assert relative_difference(torch.full((3,), 0.25), torch.zeros(3), spec_of((3,))) == 0.25


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["mine", "reference"])
def test_a_non_finite_element_gives_an_infinite_difference(wrong, side):
    mine, whole = reference(5), reference(5)
    (mine if side == "mine" else whole)[3] = wrong
    assert relative_difference(mine, whole, spec_of((5,))) == math.inf


@pytest.mark.parametrize(
    ("mine", "whole", "spec"),
    [
        (torch.zeros(()), torch.zeros(3), spec_of((3,))),  # would broadcast
        (torch.zeros(1), torch.zeros(3), spec_of((3,))),
        (torch.zeros(2), torch.zeros(3), spec_of((3,))),
        (torch.zeros(0), torch.zeros(3), spec_of((3,))),
        (torch.zeros(3, 2), torch.zeros(2, 3), spec_of((2, 3))),  # as many elements
        (torch.zeros(2, 3), torch.zeros(3, 2), spec_of((2, 3))),
        (torch.zeros(6), torch.zeros(6), spec_of((2, 3))),
        (torch.zeros(4), torch.zeros(3), spec_of((3,), Box((0,), (4,)))),  # a box beyond the tensor
    ],
)
def test_a_wrong_shape_gives_an_infinite_difference(mine, whole, spec):
    assert relative_difference(mine, whole, spec) == math.inf


def test_several_boxes_are_compared_in_the_order_of_their_memory():
    whole = reference(3, 4)
    boxes = Box((0, 2), (1, 4)), Box((1, 0), (3, 4))
    mine = whole.view(-1)[2:].clone()
    assert relative_difference(mine, whole, spec_of((3, 4), *boxes)) == 0.0
    mine[0] += 1e-3
    assert relative_difference(mine, whole, spec_of((3, 4), *boxes)) == pytest.approx(1e-3)


def test_an_empty_shard_has_difference_zero():
    assert relative_difference(torch.zeros(0), reference(3), spec_of((3,), Box((1,), (1,)))) == 0.0


@pytest.mark.parametrize(("mine", "whole"), [(None, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_missing_or_non_finite_loss_gives_an_infinite_difference(mine, whole):
    assert relative_scalar_difference(mine, whole) == math.inf


def test_one_relative_error_of_1e_9_in_one_element_is_found():
    seen, whole = Comparison(TOLERANCE), reference(40, 5)
    for step in range(5):
        for name in ("a", "b", "c"):
            mine = whole.clone()
            if (step, name) == (3, "b"):
                mine[17, 2] += 1e-9
            seen.compare_tensor("grad", step, name, mine, whole, spec_of((40, 5)))
    assert seen.first[1] == "step 3 grad b" and seen.worst[1] == "b"
    assert seen.largest["grad"] == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize(("mine", "whole"), [(None, torch.zeros(2)), (torch.zeros(2), None)])
def test_a_gradient_on_one_side_only_is_wrong_even_if_it_is_zero(mine, whole):
    seen = Comparison(TOLERANCE)
    seen.compare_tensor("grad", 0, "w", mine, whole, spec_of((2,)))
    assert seen.first[1] == "step 0 grad w" and seen.largest["grad"] == math.inf


def test_a_gradient_that_neither_side_has_is_right():
    seen = Comparison(TOLERANCE)
    seen.compare_tensor("grad", 0, "w", None, None, spec_of((2,)))
    assert seen.first is None


def test_a_nan_is_not_lost_among_larger_and_smaller_differences():
    for order in ([1e-12, math.nan, 1e-13], [math.nan, 1e-12], [1e-12, math.nan]):
        seen = Comparison(TOLERANCE)
        for diff in order:
            seen.add_difference("loss", 0, None, diff)
        assert seen.largest["loss"] == math.inf and seen.first[1] == "step 0 loss"


def test_first_is_the_earliest_step_with_gradients_before_losses():
    seen = Comparison(TOLERANCE)
    for kind, step, name in (
        ("param", 5, "p"),
        ("loss", 2, None),
        ("grad_norm", 2, None),
        ("grad", 2, "b"),
        ("grad", 2, "a"),
    ):
        seen.add_difference(kind, step, name, 1.0)
    assert seen.first[1] == "step 2 grad b"


def test_a_kind_without_a_tolerance_is_reported_but_never_wrong():
    seen = Comparison({"loss": 1e-6})
    seen.add_difference("param", 5, "w", 0.5)
    assert seen.largest["param"] == 0.5 and seen.first is None and seen.worst[1] is None


def test_on_first_is_called_once_at_the_first_wrong_value():
    told = []
    seen = Comparison(TOLERANCE, on_first=told.append)
    seen.add_difference("grad", 1, "a", 1.0)
    seen.add_difference("grad", 1, "b", 1.0)
    assert [text for _, text in told] == ["step 1 grad a"]


# Reports of all ranks, combined into a row


def make_report(**changes):
    boxes = {"w": (Box.whole((2, 2)),), "b": (Box.whole((2,)),)}
    seen = Comparison(TOLERANCE)
    values = {
        "largest": seen.largest, "worst": (0.5, "w"), "first": None, "shapes": {"w": (2, 2), "b": (2,)},
        "boxes": boxes, "digests": {"w": "x", "b": "y"}, "scalars": ((1.0, 2.0), (3.0, 4.0)), "num_reference_clips": 0,
    }  # fmt: skip
    return RankReport(**{**values, **changes})


def test_ranks_that_saw_nothing_wrong_make_a_row_that_is_ok():
    row = make_table_row(CASE, [make_report(), make_report()])
    assert row["ok"] and row["first_wrong"] is None and row["worst_tensor"] == "w"


def test_every_rank_counts_not_only_the_first():
    wrong = make_report(
        first=((1, 0, 7), "step 1 grad b"), largest=make_report().largest | {"grad": 0.5}, worst=(9.0, "b")
    )
    row = make_table_row(CASE, [make_report(), wrong])
    assert not row["ok"] and row["first_wrong"] == "step 1 grad b on rank 1"
    assert row["grad_diff"] == 0.5 and row["worst_tensor"] == "b"


def test_the_first_of_all_ranks_is_named():
    early, late = ((0, 0, 3), "step 0 grad w"), ((2, 0, 1), "step 2 grad b")
    assert (
        make_table_row(CASE, [make_report(first=late), make_report(first=early)])["first_wrong"]
        == "step 0 grad w on rank 1"
    )
    assert make_table_row(CASE, [make_report(first=early), make_report(first=early)])["first_wrong"] == "step 0 grad w"


def test_a_tensor_that_no_rank_compared_is_wrong():
    without = {"b": (Box.whole((2,)),)}
    row = make_table_row(CASE, [make_report(boxes=without), make_report(boxes=without)])
    assert not row["ok"] and "w is not on any rank" in row["first_wrong"]


def test_shards_must_cover_the_tensor():
    def halves(split):
        return [
            make_report(boxes={"w": (Box((0, 0), (split, 2)),), "b": (Box.whole((2,)),)}, digests={"w": "1", "b": "y"}),
            make_report(boxes={"w": (Box((1, 0), (2, 2)),), "b": (Box.whole((2,)),)}, digests={"w": "2", "b": "y"}),
        ]

    assert make_table_row(CASE, halves(1))["ok"]
    assert "w is not on any rank, or only in part" in make_table_row(CASE, halves(0))["first_wrong"]


def test_replicas_that_differ_in_a_bit_are_wrong():
    row = make_table_row(CASE, [make_report(), make_report(digests={"w": "x", "b": "z"})])
    assert row["first_wrong"] == "end param b differs between its replicas on ranks 0 and 1" and not row["ok"]


def test_different_losses_on_two_ranks_are_wrong():
    row = make_table_row(CASE, [make_report(), make_report(scalars=((1.0, 2.0), (3.0, 4.5)))])
    assert row["first_wrong"] == "step 1 loss or grad_norm differs between ranks 0 and 1"


@pytest.mark.parametrize(("steps", "ok"), [(0, False), (1, True), (4, True), (5, False)])
def test_a_case_about_clipping_clips_in_some_steps_and_not_in_all(steps, ok):
    row = make_table_row(CLIPPED, [make_report(num_reference_clips=steps), make_report(num_reference_clips=steps)])
    assert row["ok"] is ok


def test_one_uncovered_element_is_found():
    assert not has_uncovered_elements((2, 2), [Box((0, 0), (1, 2)), Box((1, 0), (2, 2))])
    assert has_uncovered_elements((2, 2), [Box((0, 0), (1, 2)), Box((1, 0), (2, 1))])
    assert has_uncovered_elements((2,), [])
