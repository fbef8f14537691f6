"""`minidist parity`: prints the plan, a row for each case as it ends, and the verdict; writes the rows as JSON."""

import json
import math
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidist.errors import UserError
from minidist.tools.launch import RankServer
from minidist.tools.parity.cases import GLOBAL_BATCH, STEPS, SWITCHES, Case
from minidist.tools.parity.names import parse_case_name
from minidist.tools.parity.plan import list_cases, plan_cases
from minidist.tools.parity.run import run

WIDTH = 100
NAME_SEPARATOR = "; "  # between the names or patterns of --only
_NAME_WIDTH = 44
_DIFFERENCES = ("loss_diff", "grad_diff", "grad_norm_diff", "param_diff")


@dataclass(frozen=True)
class ParityOptions:
    """Compare every layout of N ranks, and of one, with an independent training loop in one process.

    Compared on every rank: the loss and gradient norm of every step, every gradient before clipping, and every
    parameter at the end. The exit code is 0 if all agree, 1 if any differs or could not run.
    """

    ranks: int = 2
    """Ranks of the layouts to compare; one rank is always compared too."""
    json: Path | None = None
    """Write the rows to this file as JSON."""
    only: str | None = None
    """Run only rows whose name contains this text or matches it as a regular expression, such as "dp=2 bucketed.*sgd";
    or any row of --full by its exact name. Separate several by "; "."""
    full: bool = False
    """Run every combination of the switches (thousands) instead of a set that covers every pair of values."""


def main(options: ParityOptions) -> int:
    """Run the comparison and print it; returns the exit code. Raises UserError for invalid options."""
    cases = choose_cases(options)
    start_s = time.monotonic()
    rows: list[dict] = []
    not_run: list[dict] = []
    with RankServer() as server:  # it starts while the plan is printed
        _say(*describe_plan(options, cases), "", _header())
        for case, outcome in run(server, cases):
            if isinstance(outcome, dict):
                rows.append(outcome)
                _say(*format_row(outcome))
            else:
                not_run.append({"what": case.name, "why": outcome})
                _say(*_not_run_lines(case, outcome))
    wrong = sum(not row["ok"] for row in rows)
    _say("", f"{len(rows) - wrong} of {len(cases)} rows equal one process" + _counts(wrong, len(not_run), start_s))
    if options.json is not None:
        options.json.write_text(parity_json(rows, not_run, find_refused(options), describe_left_out(options, cases)))
    return 0 if rows and not wrong and len(rows) == len(cases) else 1


def choose_cases(options: ParityOptions) -> list[Case]:
    """The cases that the options select. Raises UserError if there are none, or if the JSON file cannot be written."""
    if options.ranks < 1:
        raise UserError(f"--ranks is {options.ranks}; parity needs at least 1 rank. Give --ranks 2.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.absolute().parent}. Make it first.")
    if options.only is None:
        return list_cases(plan_cases(options.ranks, options.full))
    found = [case for part in options.only.split(NAME_SEPARATOR) for case in _matching(part, options)]
    return list(dict.fromkeys(found))


def _matching(only: str, options: ParityOptions) -> list[Case]:
    """The case of that exact name, or the rows of the plan whose names match."""
    try:
        return [parse_case_name(only, options.ranks)]
    except UserError as error:
        no_name = error
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise UserError(f"--only {only!r} is not a regular expression: {error}.") from None
    cases = list_cases(plan_cases(options.ranks, options.full))
    found = [case for case in cases if only in case.name or pattern.search(case.name)]
    if not found:
        raise UserError(
            f"--only {only!r} matches none of the {len(cases)} rows of --ranks {options.ranks}, "
            f"which are named like {cases[-1].name!r}. It is not the name of another combination: {no_name}"
        )
    return found


def describe_plan(options: ParityOptions, cases: Sequence[Case]) -> list[str]:
    """The lines that describe the plan: rows per group of layouts, and the pairs of switch values they cover."""
    lines = [f"parity: {len(cases)} rows, each {STEPS} steps of {GLOBAL_BATCH} samples against one process"]
    for part in plan_cases(options.ranks, options.full):
        mine = part.select(cases)
        met, pairs = part.coverage(mine)
        meshes = len({case.mesh_layout.mesh for case in mine})
        over = f" on {meshes} meshes" if meshes > 1 else ""
        lines.append(f"  {part.title}: {len(mine)} rows{over}; {met} of the {pairs} pairs of switch values")
    values = [f"{name} {'|'.join(map(str, options))}" for name, options in SWITCHES.items()]
    lines += textwrap.wrap("switches: " + ", ".join(values), WIDTH, initial_indent="  ", subsequent_indent="    ")
    for name, why in find_refused(options).items():
        lines += textwrap.wrap(f"refused: {name}: {why}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    if options.only is not None:
        lines.append(f"  only rows that match {options.only!r}")
    return lines


def find_refused(options: ParityOptions) -> dict[str, str]:
    """Combinations that cannot run on that many ranks, with the reason; each reason once, for the first layout."""
    told: dict[str, str] = {}
    for part in plan_cases(options.ranks, options.full):
        for name, why in part.refused.items():
            told.setdefault(why, name)
    return {name: why for why, name in told.items()}


def describe_left_out(options: ParityOptions, cases: Sequence[Case]) -> dict[str, str]:
    """How many combinations of layouts and switches the options leave out, and why."""
    everything = sum(part.product for part in plan_cases(options.ranks, options.full))
    if len(cases) >= everything:
        return {}
    why = "every pair of their values is in a row that is" if options.only is None else f"--only {options.only}"
    return {f"{everything - len(cases)} more combinations of layouts and switches": why}


def _header() -> str:
    return _line("layout", "dtype", "optim", "loss", "gradient", "norm", "params", "")


def _line(name: str, dtype: str, optimizer: str, *rest: str) -> str:
    numbers = "".join(f"{word:>9}" for word in rest[:4])
    return f"{name:<{_NAME_WIDTH}} {dtype:<7} {optimizer:<5}{numbers} {rest[4]}".rstrip()


def format_row(row: dict) -> list[str]:
    """One row of the table, with long descriptions wrapped; a wrong row names the first difference."""
    name, *more = textwrap.wrap(row["layout"], _NAME_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    numbers = [f"{row[key]:.1e}" for key in _DIFFERENCES]
    lines = [_line(name, row["dtype"], row["optimizer"], *numbers, "ok" if row["ok"] else "WRONG"), *more]
    if not row["ok"]:
        lines.append(f"    wrong first: {row['first_wrong']}")
        if row["worst_tensor"] is not None:
            lines.append(f"    worst tensor: {row['worst_tensor']}")
    return lines


def _not_run_lines(case: Case, why: str) -> list[str]:
    name = textwrap.wrap(case.name, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [*name, "    NOT RUN:", *(f"    {line}" for line in why.splitlines())]


def _counts(wrong: int, not_run: int, start_s: float) -> str:
    bad = [f"{n} {what}" for n, what in ((wrong, "differ"), (not_run, "could not be run")) if n]
    return f"{'; ' if bad else ''}{', '.join(bad)} ({time.monotonic() - start_s:.1f} s)"


def parity_json(
    rows: Sequence[dict], not_run: Sequence[dict], refused: Mapping[str, str], left_out: Mapping[str, str]
) -> str:
    """The rows as JSON, and, each with its reason, the refused, failed and left-out combinations.

    JSON has no infinity. An infinite difference (a missing tensor or a non-finite number) is written as the largest
    double, 1.8e308, so that comparing it with the tolerance gives the right verdict.
    """
    finite = [{key: sys.float_info.max if value == math.inf else value for key, value in row.items()} for row in rows]
    told = {"refused": refused, "left_out": left_out}
    reasons = {key: [{"what": name, "why": why} for name, why in given.items()] for key, given in told.items()}
    whole = {"rows": finite, "not_run": list(not_run), **reasons}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def _say(*lines: str) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()
