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
from typing import Literal

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
    """Compare every layout of N ranks, and one rank, with an independent training loop in one process.

    Every rank compares the loss and gradient norm of every step, every gradient before clipping, and every parameter at
    the end. The exit code is 0 if all agree, 1 if any differs or could not run.
    """

    ranks: int = 2
    """Ranks of the layouts to compare; one rank is always compared too."""
    json: Path | None = None
    """Write the rows to this file as JSON."""
    only: str | None = None
    """Run only rows whose name contains this text or matches it as a regular expression, such as "dp=2 bucketed.*sgd";
    or the row of --full with exactly this name. Separate several by "; "."""
    engine: Literal["fast", "simple"] | None = None
    """Run the rows of this engine only (see `minidist train --help`); those of all engines when not given."""
    full: bool = False
    """Run every combination of the switches (thousands) instead of a set that covers every pair of values."""


def main(options: ParityOptions) -> int:
    """Run the parity test that the options select and print its table; return 0 if all cases agree, else 1.

    Raises UserError for invalid options.
    """
    cases = choose_cases(options)
    start_s = time.monotonic()
    rows: list[dict] = []
    not_run: list[dict] = []
    with RankServer() as server:  # it starts while the plan is printed
        _print_and_flush(*describe_plan(options, cases), "", _format_header())
        for case, outcome in run(server, cases):
            if isinstance(outcome, dict):
                rows.append(outcome)
                _print_and_flush(*format_result_row(outcome))
            else:
                not_run.append({"what": case.name, "why": outcome})
                _print_and_flush(*_format_not_run(case, outcome))
    different = sum(not row["ok"] for row in rows)
    equal = f"{len(rows) - different} of {len(cases)} rows equal one process"
    _print_and_flush("", equal + _format_failures(different, len(not_run), start_s))
    if options.json is not None:
        options.json.write_text(
            parity_json(
                rows, not_run, _list_refused_combinations(options), describe_left_out_combinations(options, cases)
            )
        )
    return 0 if rows and not different and len(rows) == len(cases) else 1


def choose_cases(options: ParityOptions) -> list[Case]:
    """Return the cases that the options select.

    Raises UserError if there are none or the JSON file cannot be written.
    """
    if options.ranks < 1:
        raise UserError(f"--ranks is {options.ranks}; parity needs at least 1 rank. Give --ranks 2.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.absolute().parent}. Make it first.")
    if options.only is None:
        return list_cases(plan_cases(options.ranks, options.full, options.engine))
    cases = [case for only in options.only.split(NAME_SEPARATOR) for case in _select_cases(only, options)]
    return list(dict.fromkeys(cases))


def _select_cases(only: str, options: ParityOptions) -> list[Case]:
    """The case of that exact name, or the rows of the plan whose names match."""
    try:
        return [parse_case_name(only, options.ranks)]
    except UserError as error:
        not_a_name = error
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise UserError(f"--only {only!r} is not a regular expression: {error}.") from None
    cases = list_cases(plan_cases(options.ranks, options.full, options.engine))
    matching = [case for case in cases if only in case.name or pattern.search(case.name)]
    if not matching:
        raise UserError(
            f"--only {only!r} matches none of the {len(cases)} rows of --ranks {options.ranks}, "
            f"which are named like {cases[-1].name!r}. It is not the name of another combination: {not_a_name}"
        )
    return matching


def describe_plan(options: ParityOptions, cases: Sequence[Case]) -> list[str]:
    """Return lines of text that say what will be compared: how many cases, and how many pairs of switch values."""
    lines = [f"parity: {len(cases)} rows, each {STEPS} steps of {GLOBAL_BATCH} samples against one process"]
    for part in plan_cases(options.ranks, options.full, options.engine):
        selected = part.filter_cases(cases)
        covered, pairs = part.count_covered_pairs(selected)
        meshes = len({case.mesh_layout.mesh for case in selected})
        over = f" on {meshes} meshes" if meshes > 1 else ""
        lines.append(f"  {part.title}: {len(selected)} rows{over}; {covered} of the {pairs} pairs of switch values")
    values = [f"{name} {'|'.join(map(str, options))}" for name, options in SWITCHES.items()]
    lines += textwrap.wrap("switches: " + ", ".join(values), WIDTH, initial_indent="  ", subsequent_indent="    ")
    for name, why in _list_refused_combinations(options).items():
        lines += textwrap.wrap(f"refused: {name}: {why}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    if options.only is not None:
        lines.append(f"  only rows that match {options.only!r}")
    return lines


def _list_refused_combinations(options: ParityOptions) -> dict[str, str]:
    """Return the combinations of layout and switch value that cannot run, each with the reason: {combination: reason}.

    Of all combinations with the same reason only the first is listed.
    """
    layout_by_reason: dict[str, str] = {}
    for part in plan_cases(options.ranks, options.full, options.engine):
        for name, why in part.refused.items():
            layout_by_reason.setdefault(why, name)
    return {name: why for why, name in layout_by_reason.items()}


def describe_left_out_combinations(options: ParityOptions, cases: Sequence[Case]) -> dict[str, str]:
    """Return {"N more combinations of layouts and switches": the reason why they do not run}; {} if none is left out.

    N counts the combinations that could run and are not among `cases`.
    """
    everything = sum(part.num_combinations for part in plan_cases(options.ranks, options.full, options.engine))
    if len(cases) >= everything:
        return {}
    why = "the rows that run contain every pair of their values" if options.only is None else f"--only {options.only}"
    return {f"{everything - len(cases)} more combinations of layouts and switches": why}


def _format_header() -> str:
    """Return the header line of the result table."""
    return _format_columns("layout", "dtype", "optim", "loss", "gradient", "norm", "params", "")


def _format_columns(name: str, dtype: str, optimizer: str, *rest: str) -> str:
    """Return a line of the result table. rest: four numbers as text, and a last cell."""
    numbers = "".join(f"{word:>9}" for word in rest[:4])
    return f"{name:<{_NAME_WIDTH}} {dtype:<7} {optimizer:<5}{numbers} {rest[4]}".rstrip()


def format_result_row(row: dict) -> list[str]:
    """Return the lines of text for one row of the result table (see `make_table_row`).

    If the row is not ok, the lines name the first difference and the worst tensor.
    """
    name, *more = textwrap.wrap(row["layout"], _NAME_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    numbers = ["-" if row[key] is None else f"{row[key]:.1e}" for key in _DIFFERENCES]
    lines = [_format_columns(name, row["dtype"], row["optimizer"], *numbers, "ok" if row["ok"] else "WRONG"), *more]
    if not row["ok"]:
        lines.append(f"    wrong first: {row['first_wrong']}")
        if row["worst_tensor"] is not None:
            lines.append(f"    worst tensor: {row['worst_tensor']}")
    return lines


def _format_not_run(case: Case, why: str) -> list[str]:
    """Return the lines about a case that could not run. why: the reason."""
    name = textwrap.wrap(case.name, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [*name, "    NOT RUN:", *(f"    {line}" for line in why.splitlines())]


def _format_failures(different: int, not_run: int, start_s: float) -> str:
    """Return the end of the last line: how many cases differ or did not run, and the seconds since `start_s`."""
    counts = ((different, "differ"), (not_run, "could not be run"))
    failures = [f"{count} {verdict}" for count, verdict in counts if count]
    return f"{'; ' if failures else ''}{', '.join(failures)} ({time.monotonic() - start_s:.1f} s)"


def parity_json(
    rows: Sequence[dict], not_run: Sequence[dict], refused: Mapping[str, str], left_out: Mapping[str, str]
) -> str:
    """Return the results as a JSON document: the rows, and each combination that did not run, with the reason.

    not_run: the cases that failed to run. refused: reasons by combination that cannot run. left_out: reasons by
    combination that was not selected. JSON has no infinity: an infinite difference (a missing tensor or a non-finite
    number) is written as the largest double, 1.8e308, so that comparing it with the tolerance gives the right verdict.
    """
    finite = [{key: sys.float_info.max if value == math.inf else value for key, value in row.items()} for row in rows]
    omitted = {"refused": refused, "left_out": left_out}
    reasons = {key: [{"what": name, "why": why} for name, why in of_key.items()] for key, of_key in omitted.items()}
    document = {"rows": finite, "not_run": list(not_run), **reasons}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _print_and_flush(*lines: str) -> None:
    """Print lines and flush standard output, so that a pipe shows each row as it ends."""
    for line in lines:
        print(line)
    sys.stdout.flush()
