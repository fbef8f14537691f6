"""`minidist chaos`: prints a line per trial and a table by phase and kind, and writes the trials as JSON."""

import contextlib
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from minidist.errors import UserError
from minidist.tools.chaos.faults import KINDS, PHASES
from minidist.tools.chaos.plan import Trial, draw_trial
from minidist.tools.chaos.trial import Outcome, TrialRunner
from minidist.tools.launch import RankServer


@dataclass(frozen=True)
class ChaosOptions:
    """Inject faults drawn from a seed into small training runs, resume the runs, and check that nothing was lost.

    Each trial runs 20 steps on some layout with a fault (see `minidist train --help`, fault.inject), then resumes on
    the same or another layout. The trial checks how the run ended, that the newest checkpoint loads, the losses after
    the resume (bit for bit on the same layout, within 1e-6 on another), and that no process, shared memory or partial
    checkpoint is left. Half of the runs in which one of several ranks is killed recover live: they must go on to the
    end, with losses within 1e-6. The exit code is 1 if any trial fails.
    """

    seed: int = 0
    """The trials are a function of the seed and --ranks."""
    trials: int = 50
    """Number of trials."""
    first: int = 0
    """Number of the first trial: to go on with a seed, or to repeat one trial."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks that the runs may have."""
    json: Path | None = None
    """Write the trials to this file as JSON."""
    keep: Path | None = None
    """Run in this folder, which must not exist yet, and keep it; failed trials stay there."""


def main(options: ChaosOptions) -> int:
    """Run the trials that the options select, print their results, and return the exit code: 0 if all passed, else 1.

    Raises UserError for invalid options.
    """
    _check_options(options)
    start_s = time.monotonic()
    outcomes: list[tuple[Trial, Outcome]] = []
    preload = ("safetensors.torch", "minidist.tools.chaos.trial")
    with RankServer(preload=preload) as server, _open_folder(options.keep) as folder:
        runner = TrialRunner(server, Path(folder))
        for number in range(options.first, options.first + options.trials):
            trial = draw_trial(options.seed, number, options.ranks)
            outcome = runner.run_trial(trial)
            outcomes.append((trial, outcome))
            print(*_format_outcome(trial, outcome, options), sep="\n", flush=True)
            if options.json is not None:
                options.json.write_text(format_json(options, outcomes))
    failed = sum(bool(outcome.problems) for _, outcome in outcomes)
    print("", *format_table(outcomes), "", sep="\n")
    print(f"{len(outcomes) - failed} of {len(outcomes)} trials as they should ({time.monotonic() - start_s:.0f} s)")
    return 1 if failed else 0


def _repeat_command(trial: Trial, options: ChaosOptions) -> str:
    """Return the command line that runs `trial` again."""
    ranks = " ".join(map(str, options.ranks))
    return f"minidist chaos --seed {options.seed} --first {trial.number} --trials 1 --ranks {ranks}"


def format_table(outcomes: list[tuple[Trial, Outcome]]) -> list[str]:
    """Return the lines of a table: how many of all trials passed, by phase and kind of the fault."""
    done, passed = Counter(), Counter()
    for trial, outcome in outcomes:
        at = trial.fault.phase, trial.fault.kind
        done[at] += 1
        passed[at] += not outcome.problems
    lines = [f"{'phase':<10}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for phase in PHASES:
        cells = (f"{passed[phase, kind]}/{done[phase, kind]}" if done[phase, kind] else "-" for kind in KINDS)
        lines.append(f"{phase:<10}" + "".join(f"{cell:>9}" for cell in cells))
    return lines


def format_json(options: ChaosOptions, outcomes: list[tuple[Trial, Outcome]]) -> str:
    """Format the trials and their outcomes as a JSON document, the contents of the file of `--json`."""
    rows = [
        {
            "trial": trial.number,
            "fault": str(trial.fault),
            "layout": str(trial.layout),
            "resumed_layout": str(trial.resumed_layout),
            "ranks": [trial.layout.num_ranks, trial.resumed_layout.num_ranks],
            "background": trial.saves_in_background,
            "live_recovery": trial.live_recovery,
            "ended": outcome.ended,
            "resumed_step": outcome.resumed_step,
            "largest_difference": outcome.difference,
            "seconds": round(outcome.seconds, 3),
            "problems": outcome.problems,
            "command": _repeat_command(trial, options),
        }
        for trial, outcome in outcomes
    ]
    return json.dumps({"seed": options.seed, "ranks": list(options.ranks), "trials": rows}, indent=1) + "\n"


def _format_outcome(trial: Trial, outcome: Outcome, options: ChaosOptions) -> list[str]:
    """Return the lines about one trial: how it ended, and for a failed trial the problems and a command."""
    where = f"from step {outcome.resumed_step}" if outcome.resumed_step else "from the start"
    verdict = "FAILED" if outcome.problems else f"ok, resumed {where}, losses differ by {outcome.difference:.0e}"
    lines = [f"{trial.number:>4}  {trial}: {verdict} ({outcome.seconds:.1f} s)"]
    if outcome.problems:
        lines += [f"        {line}" for problem in outcome.problems for line in problem.splitlines()]
        lines += [f"      again: {_repeat_command(trial, options)}"]
    return lines


def _open_folder(keep: Path | None) -> contextlib.AbstractContextManager:
    """Return a context manager for the folder of all runs: `keep`, or a temporary one if that is None."""
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="minidist-chaos-")
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--keep {keep}: {error.strerror}. Give a folder that does not exist yet.") from None
    return contextlib.nullcontext(keep)


def _check_options(options: ChaosOptions) -> None:
    """Raise UserError for options out of range, before any trial runs."""
    if options.trials < 1 or options.first < 0:
        raise UserError(
            f"--trials is {options.trials}, --first {options.first}: give at least 1 trial, and a first from 0."
        )
    if not options.ranks or not set(options.ranks) <= {1, 2, 4}:
        raise UserError(f"--ranks is {' '.join(map(str, options.ranks))}: give some of 1 2 4, which divide the batch.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.absolute().parent}. Make it first.")
