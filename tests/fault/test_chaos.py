"""`minidist chaos`: seeded faults in small runs, which resume with nothing lost."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from minidist.errors import UserError
from minidist.tools.chaos.command import ChaosOptions, format_json, format_table, main
from minidist.tools.chaos.faults import KINDS, PHASES, Fault
from minidist.tools.chaos.plan import STEPS, Trial, TrialLayout, draw_trial, list_layouts
from minidist.tools.chaos.trial import Outcome, TrialRunner, find_leftover_resources
from minidist.tools.cli import main as cli

ONE, DP, ZERO, TP, PP = (
    TrialLayout(),
    TrialLayout(dp=2),
    TrialLayout(dp=2, zero=3),
    TrialLayout(tp=2),
    TrialLayout(pp=2),
)
# Each kind and each phase once.
QUICK = [
    Trial(0, ONE, DP, Fault("kill", 0, 6, "forward"), True),
    Trial(1, DP, DP, Fault("nan", 1, 6, "backward"), True),
    Trial(2, ZERO, ONE, Fault("kill", 1, 9, "reduce"), True),
    Trial(3, TP, TP, Fault("stop", 1, 10, "agree"), False),
    Trial(4, ONE, ONE, Fault("flip", 0, 7, "update"), True),
    Trial(5, TrialLayout(dp=2, zero=1), ONE, Fault("kill", 0, 5, "gather"), True),
    Trial(6, ONE, ONE, Fault("slow", 0, 16, "copy"), True),
    Trial(7, PP, ONE, Fault("full", 1, 8, "write"), True),
    Trial(8, ONE, ONE, Fault("kill", 0, 8, "rename"), False),
]
LIVE = [
    Trial(10, DP, DP, Fault("kill", 1, 8, "write"), True, live_recovery=True),
    Trial(11, TrialLayout(dp=2, tp=2, zero=1), ONE, Fault("kill", 0, 8, "rename"), True, live_recovery=True),
    Trial(12, PP, ONE, Fault("kill", 1, 9, "update"), False, live_recovery=True),
]


@pytest.fixture(scope="module")
def runner(server, tmp_path_factory):
    return TrialRunner(server, tmp_path_factory.mktemp("chaos"))


def test_the_quick_trials_are_of_each_kind_and_each_phase():
    assert {trial.fault.kind for trial in QUICK} == set(KINDS)
    assert [trial.fault.phase for trial in QUICK] == list(PHASES)


@pytest.mark.parametrize("trial", QUICK, ids=str)
def test_a_run_with_a_fault_resumes_with_nothing_lost(runner, trial):
    outcome = runner.run_trial(trial)
    assert outcome.problems == []
    completed = trial.fault.kind in ("slow", "full")
    assert (outcome.ended == "went on") == (completed or trial.fault.kind == "flip")
    assert (outcome.resumed_step == STEPS) == completed


@pytest.mark.parametrize(
    "trial", [LIVE[0], *(pytest.param(trial, marks=pytest.mark.exhaustive) for trial in LIVE[1:])], ids=str
)
def test_a_run_with_live_recovery_goes_on_to_its_end(runner, trial):
    outcome = runner.run_trial(trial)
    assert (outcome.problems, outcome.ended, outcome.resumed_step) == ([], "went on", STEPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(38))
def test_each_kind_of_fault_in_each_phase(runner, number):
    trial = draw_trial(3, number, (1, 2, 4))
    assert runner.run_trial(dataclasses.replace(trial, number=1000 + number)).problems == []


def test_other_losses_and_a_fault_that_never_came_are_problems(runner, monkeypatch):
    trial = Trial(20, ONE, ONE, Fault("slow", 0, STEPS + 1, "forward"), True)
    assert runner.run_trial(trial).problems == ["the fault was not injected"]
    wrong = runner.reference_losses(ONE) | {STEPS: 0.0}
    monkeypatch.setattr(runner, "reference_losses", lambda layout: wrong)
    trial = Trial(21, ONE, ONE, Fault("kill", 0, 18, "forward"), True)
    [problem] = runner.run_trial(trial).problems
    assert problem.startswith(f"step {STEPS}: the loss is ") and "0.0 in the uninterrupted run" in problem


def test_what_a_run_leaves_behind_is_found(tmp_path):
    names = ("config.toml", "metrics.jsonl", "lock", "checkpoints/step-00000004", "checkpoints/step-00000008.partial")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    process = int(Path("/proc/self").resolve().name)
    assert find_leftover_resources(tmp_path, [process]) == [
        "left in the run folder: checkpoints/step-00000008.partial, lock",
        f"process {process} is still there",
    ]


def test_trials_are_a_function_of_the_seed_and_cover_all_faults_and_layouts():
    trials = [draw_trial(7, number, (1, 2, 4)) for number in range(500)]
    assert trials == [draw_trial(7, number, (4, 2, 1)) for number in range(500)]
    assert trials != [draw_trial(8, number, (1, 2, 4)) for number in range(500)]
    combinations = {(kind, phase) for kind, phases in KINDS.items() for phase in phases}
    first = Counter((trial.fault.kind, trial.fault.phase) for trial in trials[: len(combinations)])
    assert first == dict.fromkeys(combinations, 1)
    everything = {layout for ranks in (1, 2, 4) for layout in list_layouts(ranks)}
    assert {trial.layout for trial in trials} == everything == {trial.resumed_layout for trial in trials}
    assert {layout.num_ranks for layout in everything} == {1, 2, 4} and {layout.zero for layout in everything} == {
        0,
        1,
        3,
    }
    assert all(trial.fault.rank < trial.layout.num_ranks and trial.fault.step < STEPS for trial in trials)


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "trials.json"
    assert cli(["chaos", "--seed", "3", "--trials", "1", "--ranks", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("   0  ") and ": ok, resumed from " in lines[0]
    assert sum("1/1" in line for line in lines) == 1 and lines[-1].startswith("1 of 1 trials as they should")
    [row] = json.loads(file.read_text())["trials"]
    assert row["problems"] == [] and row["command"] == "minidist chaos --seed 3 --first 0 --trials 1 --ranks 1"


def test_a_failed_trial_counts_as_failed():
    outcomes = [(QUICK[0], Outcome()), (QUICK[2], Outcome(problems=["a"])), (QUICK[2], Outcome())]
    table = dict(line.split()[:2] for line in format_table(outcomes)[1:])
    assert table["forward"] == "1/1" and table["reduce"] == "1/2" and table["update"] == "-"
    assert [row["problems"] for row in json.loads(format_json(ChaosOptions(), outcomes))["trials"]] == [[], ["a"], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ChaosOptions(trials=0), "--trials is 0"),
        (ChaosOptions(ranks=(3,)), "--ranks is 3"),
        (ChaosOptions(json=Path("missing/a.json")), "there is no folder"),
        (ChaosOptions(keep=Path("/proc")), "--keep /proc: File exists"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        main(options)
