"""Parity cases are found by their names, and a misspelt name is refused with the correct one."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.tools.parity import command
from minidist.tools.parity.cases import SWITCHES
from minidist.tools.parity.command import ParityOptions, choose_cases, describe_left_out_combinations, describe_plan
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.tools.parity.names import parse_case_name
from minidist.tools.parity.plan import list_cases, make_case, plan_cases, possible_switch_values
from minidist.validation import validate

NAME = "dp=2 naive micro-batches=4 untied clip empty-step float64 sgd"


@given(ranks=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_every_valid_case_name_parses_to_its_case(ranks, seed):
    """An invalid combination's name is refused with the reason why it cannot run."""
    draw = random.Random(seed)
    layout = draw.choice([Layout(), *list_layouts(ranks)])
    case = make_case(layout, {switch: draw.choice(values) for switch, values in possible_switch_values(layout).items()})
    try:
        validate(case.config(), case.world_size)
    except UserError as error:
        with pytest.raises(UserError) as refused:
            parse_case_name(case.name, ranks)
        assert str(refused.value) == str(error)
    else:
        assert parse_case_name(case.name, ranks) == case


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_case_names_of_the_plan_parse_to_their_cases(ranks):
    for case in list_cases(plan_cases(ranks)):
        assert parse_case_name(case.name, ranks) == case


@given(layout=st.sampled_from(list_layouts(4)), seed=st.integers(0, 2**32))
def test_case_names_are_unique(layout, seed):
    """Counted over the values of one switch, with the others at random."""
    draw = random.Random(seed)
    values = {switch: draw.choice(possible) for switch, possible in SWITCHES.items()}
    for switch, possible in SWITCHES.items():
        names = {make_case(layout, values | {switch: value}).name for value in possible}
        assert len(names) == len(possible)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dp=2 naive tied clip padding float64 sgd", "this one is named 'dp=2 naive tied padding clip float64 sgd'"),
        ("dp=2 naive float64 sgd", "this one is named 'dp=2 naive tied float64 sgd'"),
        ("dp=2 naive tied untied float64 sgd", "this one is named 'dp=2 naive untied float64 sgd'"),
        ("dp=2  naive tied float64 sgd", "this one is named 'dp=2 naive tied float64 sgd'"),
        ("dp=2 naiv tied float64 sgd", "'naiv' is not a word of a row on dp=2; did you mean 'naive'?"),
        ("dp=2 naive tied dropout=0.2 float64 sgd", "'dropout=0.2' is not a word of a row on dp=2; did you mean 'dr"),
        ("dp=2 gpipe naive tied float64 sgd", "'gpipe' is not a word of a row on dp=2; its words are bucketed, tied, "),
        ("dp=3 naive tied float64 sgd", "begins with none of the layouts of 2 ranks, which are like 'pp=2 zb-v'"),
        ("pp=2 naive tied float64 sgd", "begins with none of the layouts of 2 ranks"),
        ("tp=2 zero1 tied float64 sgd", "gradients is zero1, and on tp=2 it can only be bucketed, naive"),
        ("dp=2 zero1-hybrid tied float64 sgd", "gradients is zero1-hybrid, and on dp=2 it can only be bucketed, "),
        ("dp=2 naive tied bf16 sgd", "comm.gradients is naive, which needs zero.stage 0"),
        (
            "pp=2 zb-h2 naive tied float64 sgd",
            "zb-h2 needs 2 x 2 stages - 1 = 3 micro-batches in flight, but there are only 1",
        ),
    ],
)
def test_a_misspelt_case_name_is_refused_with_the_mistake(name, message):
    with pytest.raises(UserError) as error:
        parse_case_name(name, 2)
    assert message in str(error.value)
    with pytest.raises(UserError) as error:
        choose_cases(ParityOptions(only=name))
    assert f"--only {name!r} matches none of the" in str(error.value) and message in str(error.value)


def test_only_accepts_several_names_and_patterns():
    rows = [case for case in list_cases(plan_cases(2)) if case.name.startswith("tp=2 ")]
    found = choose_cases(ParityOptions(only=f"{NAME}; ^tp=2 ; {rows[1].name}; {NAME}"))
    assert [case.name for case in found] == [NAME, *(case.name for case in rows)]


def test_choosing_by_name_builds_no_plan(monkeypatch):
    monkeypatch.setattr(command, "plan_cases", pytest.fail)
    assert [case.name for case in choose_cases(ParityOptions(only=NAME))] == [NAME]


def test_a_case_outside_the_plan_is_counted_in_the_description():
    options = ParityOptions(only=NAME)
    cases = choose_cases(options)
    assert not set(cases) & set(list_cases(plan_cases(2)))
    described = list(describe_plan(options, cases))
    assert [line for line in described if re.match(r"  dp=2: 1 rows; 91 of the \d+ pairs", line)]  # 14 switches
    everything = sum(part.num_combinations for part in plan_cases(2))
    assert list(describe_left_out_combinations(options, cases)) == [
        f"{everything - 1} more combinations of layouts and switches"
    ]
