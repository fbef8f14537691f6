"""The simulated run keeps the books of a failing run, and its mean agrees with the formula of the failure model."""

import pytest

from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.simulate.failures import LOST, RESTART, SAVING, USEFUL, simulate_run_with_failures, time_by_kind


@pytest.mark.parametrize("seed", range(5))
def test_phases_follow_each_other_and_all_work_is_done(seed):
    phases = simulate_run_with_failures(
        FailureModel(mtbf_s=100, save_s=3, restart_s=20), interval_s=40, num_intervals=30, seed=seed
    )
    assert phases[0].start == 0 and all(a.stop == b.start for a, b in zip(phases, phases[1:], strict=False))
    assert [phase.kind for phase in phases if phase.kind in (USEFUL, SAVING)] == [USEFUL, SAVING] * 30
    seconds = time_by_kind(phases)
    assert seconds[USEFUL] == pytest.approx(30 * 40) and seconds[SAVING] == pytest.approx(30 * 3)
    assert seconds[LOST] > 0 and seconds[RESTART] >= 20
    assert all(b.kind == RESTART for a, b in zip(phases, phases[1:], strict=False) if a.kind == LOST)


@pytest.mark.parametrize("interval_s, restart_s", [(10, 0), (60, 25), (150, 80)])
def test_the_mean_time_of_an_interval_is_that_of_the_failure_model(interval_s, restart_s):
    model, intervals = FailureModel(mtbf_s=100, save_s=5, restart_s=restart_s), 40_000
    mean_s = simulate_run_with_failures(model, interval_s, intervals, seed=1)[-1].stop / intervals
    assert mean_s == pytest.approx(model.expected_time_s(interval_s), rel=0.03)


def test_without_failures_nothing_is_lost():
    phases = simulate_run_with_failures(
        FailureModel(mtbf_s=1e12, save_s=1, restart_s=5), interval_s=10, num_intervals=4
    )
    assert time_by_kind(phases) == {USEFUL: 40, SAVING: 4}
