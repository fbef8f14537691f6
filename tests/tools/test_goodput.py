"""The best checkpoint interval, against a numerical minimisation and a simulation of failures."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.tools import cli
from minidist.tools.estimate.goodput import FailureModel


def minimise(function, low, high):
    """The x in (low, high), both above 0, with the smallest function(x): golden-section search over log x."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    while b - a > 1e-9:
        left, right = b - golden * (b - a), a + golden * (b - a)
        if function(math.exp(left)) < function(math.exp(right)):
            b = right
        else:
            a = left
    return math.exp((a + b) / 2)


def log_time_per_work(tau, mtbf, save):
    """log(E(tau) / tau) up to a constant, written so that it does not overflow."""
    x = (tau + save) / mtbf
    return (math.log(math.expm1(x)) if x < 500 else x) - math.log(tau)


@given(
    mtbf=st.floats(1.0, 1e7),
    save_over_mtbf=st.floats(-6.0, 1.5).map(lambda power: 10**power),
)
def test_exact_interval_is_the_numerical_minimum(mtbf, save_over_mtbf):
    model = FailureModel(mtbf, mtbf * save_over_mtbf, 10.0)
    found = minimise(lambda tau: log_time_per_work(tau, mtbf, model.save_s), mtbf * 1e-5, 2 * mtbf)
    # The function is flat at its minimum: its value in float64 fixes tau to about the root of eps.
    assert model.exact_interval_s() == pytest.approx(found, rel=1e-4)


def test_exact_interval_keeps_four_digits_where_saves_are_almost_free():
    # tau / M -> sqrt(2 D / M) (1 - sqrt(2 D / M) / 3 + ...), the series of the exact equation around 0.
    for ratio in (1e-16, 1e-12, 1e-8):
        x = math.sqrt(2 * ratio)
        assert FailureModel(1.0, ratio).exact_interval_s() == pytest.approx(x * (1 - x / 3), rel=1e-6)


def test_young_and_daly():
    # Young: sqrt(2 * 60 * 10800). Daly adds sqrt(D / 2M) / 3 and D / 2M / 9 and subtracts D.
    model = FailureModel(10_800.0, 60.0)
    assert model.young_interval_s() == pytest.approx(1138.4200, rel=1e-6)
    root = math.sqrt(60 / 21_600)
    assert model.daly_interval_s() == pytest.approx(1138.4200 * (1 + root / 3 + root**2 / 9) - 60, rel=1e-6)
    assert FailureModel(10.0, 20.0).daly_interval_s() == 10.0  # D >= 2 M
    assert FailureModel(10.0, 500.0).daly_interval_s() == 10.0


@given(st.floats(1e-6, 1e-3))
def test_all_three_agree_where_saves_are_short(ratio):
    model = FailureModel(1.0, ratio)
    # Young's is wrong by the order of sqrt(D / M), Daly's by D / M.
    assert model.exact_interval_s() == pytest.approx(model.young_interval_s(), rel=math.sqrt(ratio))
    assert model.exact_interval_s() == pytest.approx(model.daly_interval_s(), rel=ratio)


def simulate(mtbf, save, restart, interval, intervals, seed):
    """The time that `intervals` intervals take when failures come at random."""
    clock, draw = 0.0, random.Random(seed)
    for _ in range(intervals):
        until_failure = draw.expovariate(1 / mtbf)
        while until_failure < interval + save:
            clock += until_failure
            while (until_failure := draw.expovariate(1 / mtbf)) < restart:
                clock += until_failure  # another failure while restarting
            clock += restart
            until_failure = draw.expovariate(1 / mtbf)
        clock += interval + save
    return clock


@pytest.mark.parametrize(("mtbf", "save", "restart", "interval"), [(100.0, 5.0, 20.0, 40.0), (50.0, 10.0, 5.0, 80.0)])
def test_expected_time_and_goodput_are_those_of_simulated_failures(mtbf, save, restart, interval):
    model, count = FailureModel(mtbf, save, restart), 20_000
    simulated = simulate(mtbf, save, restart, interval, count, seed=1) / count
    # The mean of 20,000 samples whose spread is about two means: 1.4 % is one standard error.
    assert model.expected_time_s(interval) == pytest.approx(simulated, rel=0.05)
    assert model.goodput(interval) == pytest.approx(interval / simulated, rel=0.05)


def test_first_order_waste_approaches_the_exact_one():
    model = FailureModel(1e6, 1.0, 5.0)
    interval = model.young_interval_s()
    # The next order is (tau + D + R)^2 / M^2 and products of its parts: 1e-6.
    assert model.first_order_waste(interval) == pytest.approx(1 - model.goodput(interval), abs=4e-6)
    assert model.first_order_waste(interval) == pytest.approx(math.sqrt(2e-6) + 5e-6, rel=1e-12)


def test_a_hopeless_run_has_no_goodput_and_no_error():
    assert FailureModel(1.0, 5000.0).goodput(1.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 1), "mtbf_s"),
        ((-1, 1, 1), "mtbf_s"),
        ((1, 0, 1), "save_s"),
        ((1, 1, -1), "restart_s"),
        ((1, math.inf, 0), "save_s"),
        ((math.nan, 1, 0), "mtbf_s"),
    ],
)
def test_impossible_numbers_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        FailureModel(*arguments)


OPTIONS = ["estimate", "--ranks", "2", "--mtbf-s", "10800", "--save-s", "60", "--restart-s", "120"]
FIGURES = ("interval_young_s", "interval_daly_s", "interval_exact_s", "waste_first_order", "goodput")


@pytest.mark.parametrize("more", [[], ["--parameters", "7.5e9"], ["--block", "gpt"]])
def test_the_estimate_prints_the_figures(capsys, more):
    assert cli.main([*OPTIONS, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = FailureModel(10800, 60, 120)
    exact = model.exact_interval_s()
    expected = (model.young_interval_s(), model.daly_interval_s(), exact)
    expected += (model.first_order_waste(model.young_interval_s()), model.goodput(exact))
    assert [found[name] for name in FIGURES] == pytest.approx(expected)
    assert cli.main([*OPTIONS, *more]) == 0
    assert "best time between saves: 1099 s (Young 1138 s, Daly 1099 s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mtbf-s", "100"], "--mtbf-s 100 without --save-s"),
        (["--restart-s", "5"], "--restart-s 5 without --mtbf-s and --save-s"),
        (["--mtbf-s", "0", "--save-s", "5"], "--mtbf-s is 0; it must be a finite number above 0"),
    ],
)
def test_part_of_a_failure_model_is_refused(capsys, options, message):
    assert cli.main(["estimate", *options]) == 2
    assert message in capsys.readouterr().err
