"""The certificate: the learner's functions train the model under torchrun, and equal one process in every layout.

`make_certificate` checks changed files again, proves layouts (`certificate_proofs`), and trains (`certificate_run`)
with these functions and with the fast engine. Then it writes a page (`certificate_page`) and a JSON file, both made
only from what was measured.
"""

import json
import platform
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exercises import report
from exercises.attempt import grade_attempt
from exercises.catalogue import NONE, Catalogue, Exercise
from exercises.certificate_page import COMPARED, render_page
from exercises.certificate_proofs import hybrid_options, prove_layouts, repair_flipped_bit
from exercises.check import modules_to_preload
from exercises.layouts import read_layouts, read_resumed
from exercises.learner_pieces import LearnerPiece, read_piece
from exercises.torchrun_process import hold_signals
from exercises.work import Work
from minidist import __version__
from minidist.errors import RunError, UserError, format_count
from minidist.tools.launch import RankServer
from minidist.tools.launch.threads import usable_cores
from minidist.tools.output_files import write_atomically
from minidist.tools.standard_streams import drop_failed_writes

DEFAULT_RANKS = 8
TRAINING_DEADLINE_S = 600.0
STEPS = 60
_LOSS_TOLERANCE = 1e-3  # relative, of any step: float32, summed in another order
_MODEL = (
    *("--model.hidden-size", "64", "--model.intermediate-size", "128", "--data.seq-len", "64", "--device", "cpu"),
    *("--train.sample-tokens", "0", "--train.eval-every", "0", "--train.eval-samples", "64"),
    *("--train.log-every", "20", "--comm.hang-limit-s", "60"),
)
_PRELOAD = ("torch._dynamo", "minidist.tools.parity.ranks", "minidist.tools.launch.run")
# How each kind of figure was had, as the page shows it.
LABELS = {
    "differences": "observed",
    "losses": "observed",
    "held_out_loss": "observed",
    "unigram_loss": "computed",
    "bigram_loss": "computed",
    "largest_loss_difference": "computed",
    "step_s": "observed",
    "fastest_step_s": "observed",
    "peak_memory": "observed",
    "operations": "counted",
    "counted_bytes_per_step": "counted",
    "modelled_bytes_per_step": "modelled",
    "calls": "counted",
    "cores": "observed",
}


@drop_failed_writes("stdout", "stderr")
def make_certificate(
    catalogue: Catalogue,
    work: Work,
    ranks: int,
    file: Path,
    steps: int = STEPS,
    deadline_s: float = TRAINING_DEADLINE_S,
) -> bool:
    """Prove and train with the learner's functions, and write the page `file` and a JSON file beside it.

    ranks: of the hybrid layout. deadline_s: of each of the two training runs. Returns whether the certificate is
    passed. Printed lines that cannot be written are dropped. Raises UserError if no function can be used, or for an
    impossible request; then nothing is written.
    """
    options = [*hybrid_options(ranks), *_MODEL, "--train.steps", str(steps)]
    if file.suffix != ".html":
        raise UserError(
            f"--out {file}: the certificate is a page, whose name ends in .html; a .json is written beside it"
        )
    if not file.absolute().parent.is_dir():
        raise UserError(f"--out {file}: there is no folder {file.absolute().parent}. Make it first.")
    used, left_out = choose_functions(catalogue, work)
    pieces = [read_piece(exercise, work) for exercise in used]
    for line in [*(f"{'yours':<9}{each.name}" for each in used), *(f"{'left out':<9}{each}" for each in left_out)]:
        print(line, flush=True)
    with tempfile.TemporaryDirectory(prefix="minidist-certificate-") as folder:
        layouts, repair = _prove(pieces, catalogue, ranks, Path(folder))
        training = None
        if repair["ok"] and all(layout["ok"] for layout in layouts):
            training = _train_both(options, pieces, ranks, Path(folder), deadline_s)
    certificate = _describe(used, left_out, catalogue, ranks, layouts, repair, training)
    write_atomically(file, render_page(certificate, file.with_suffix(".json").name))
    write_atomically(file.with_suffix(".json"), json.dumps(certificate, indent=1, allow_nan=False) + "\n")
    reasons = certificate["verdict"]["reasons"]
    print("\n".join(["passed" if not reasons else "not passed:", *reasons]), flush=True)
    print(f"certificate: {file}; all numbers: {file.with_suffix('.json')}", flush=True)
    return not reasons


def choose_functions(catalogue: Catalogue, work: Work) -> tuple[list[Exercise], list[str]]:
    """Return the exercises whose answers a training run can use, and a line for each answer that it cannot use.

    A file that the learner has edited since its last verdict "passed", or that has none, is checked again. Raises
    UserError if no answer can be used.
    """
    trained = [each for each in catalogue.values() if each.is_trained]
    unknown = [each for each in trained if work.is_edited(each) and not work.is_unchanged_since_pass(each)]
    if unknown:
        print(f"checking {format_count(len(unknown), 'file')} that changed since the last verdict", flush=True)
        with hold_signals():
            server = RankServer(preload=modules_to_preload(unknown))
        with server:
            for exercise in unknown:
                verdict, _ = grade_attempt(exercise, work, server)
                print(report.format_title(verdict), flush=True)
    used = [each for each in trained if work.is_unchanged_since_pass(each)]
    left_out = [f"{each.name:<26}does not pass: python -m exercises check {each.name}" for each in unknown]
    left_out = [line for line, each in zip(left_out, unknown, strict=True) if each not in used]
    left_out += [
        f"{each.name:<26}{each.route.removeprefix(NONE)}"
        for each in catalogue.values()
        if each.kind == "piece" and not each.is_trained and work.entry(each).get("passed")
    ]
    if not used:
        raise UserError(
            "you have not passed an exercise yet whose function trains the model, so there is nothing to certify.\n"
            "python -m exercises list shows the exercises; python -m exercises check NAME checks your answer to one."
        )
    return used, left_out


def _prove(
    pieces: Sequence[LearnerPiece], catalogue: Catalogue, ranks: int, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the records of all layouts, and of the live repair; print a line for each as it ends."""
    layouts = []
    with hold_signals():
        server = RankServer(preload=_PRELOAD)
    with server:
        print("layouts with your functions, compared with one process:", flush=True)
        known, resumed = read_layouts(catalogue.root), read_resumed(catalogue.root)
        for layout in prove_layouts(pieces, ranks, known, resumed, server):
            layouts.append(layout)
            what = layout["differences"].get("grad")
            what = layout["differences"].get("param") if what is None else what
            verdict = f"equal, {what:.1e}" if layout["ok"] else f"DIFFERS: {layout['reason']}"
            print(f"  {layout['name']:<15}{layout['layout']}, {layout['dtype']}: {verdict}", flush=True)
        repair = repair_flipped_bit(pieces, server, folder)
        print(f"  live repair    {repair['note'] if repair['ok'] else 'FAILED: ' + repair['reason']}", flush=True)
    return layouts, repair


def _train_both(
    options: Sequence[str], pieces: Sequence[LearnerPiece], ranks: int, folder: Path, deadline_s: float
) -> dict[str, Any]:
    """Train with the learner's functions, then with the fast engine; return both results, or why there are none."""
    from exercises.certificate_run import measure_training  # it imports torch

    training: dict[str, Any] = {"options": " ".join(options), "ranks": ranks}
    try:
        for key, engine, own in (("yours", "simple", pieces), ("fast", "fast", ())):
            what = "your functions" if key == "yours" else "the fast engine"
            print(f"training under torchrun with {what}:", flush=True)
            argv = ["--engine", engine, *options]
            training[key] = measure_training(argv, own, ranks, folder / key, deadline_s)
    except RunError as error:
        print(f"FAILED: {error}", flush=True)
        return {**training, "failure": str(error)}
    yours, fast = training["yours"], training["fast"]
    pairs = list(zip(yours["losses"], fast["losses"], strict=True))
    return {
        **training,
        "steps": len(pairs),
        "largest_loss_difference": max(abs(mine - other) / abs(other) for mine, other in pairs),
        "comparison": {key: {"yours": _largest(yours, key), "fast": _largest(fast, key)} for key in COMPARED},
    }


def _largest(result: dict[str, Any], key: str) -> float:
    """Return a figure of a run: of the whole run, or the largest of its ranks."""
    return result[key] if key in result else max(rank[key] for rank in result["ranks"])


def _describe(
    used: Sequence[Exercise],
    left_out: Sequence[str],
    catalogue: Catalogue,
    ranks: int,
    layouts: Sequence[dict[str, Any]],
    repair: dict[str, Any],
    training: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the certificate, of which the page and the JSON file are made."""
    import torch

    functions = [
        {
            "exercise": each.name,
            "symbol": each.piece,
            "section": each.section,
            **_calls_of(each.name, layouts, repair, training),
        }
        for each in used
    ]
    return {
        "verdict": _decide(functions, layouts, repair, training),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"minidist": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": {"cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}"},
        "ranks": ranks,
        "labels": LABELS,
        "functions": functions,
        "num_functions": len(functions),
        "num_functions_of_course": sum(each.is_trained for each in catalogue.values()),
        "left_out": list(left_out),
        "layouts": list(layouts),
        "repair": repair,
        "training": training,
    }


def _calls_of(
    name: str, layouts: Sequence[dict[str, Any]], repair: dict[str, Any], training: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the calls of a function in training, by rank and in all, and in all layouts and the repair together."""
    by_rank = (training or {}).get("yours", {}).get("calls", {}).get(name, [])
    others = [*(layout["calls"] for layout in layouts), repair["calls"]]
    return {
        "training_calls_by_rank": by_rank,
        "training_calls": sum(by_rank),
        "proof_calls": sum(sum(calls.get(name, [])) for calls in others),
    }


def _decide(
    functions: Sequence[dict[str, Any]],
    layouts: Sequence[dict[str, Any]],
    repair: dict[str, Any],
    training: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return whether the certificate is passed, and otherwise the reasons, one line each."""
    reasons = [
        f"{layout['name']} ({layout['layout']}) differs from one process: {layout['reason']}"
        for layout in layouts
        if not layout["ok"]
    ]
    reasons += [] if repair["ok"] else [f"the live repair failed: {repair['reason']}"]
    if training is None:
        reasons.append("the training run was left out")
    elif "failure" in training:
        reasons.append(training["failure"])
    else:
        difference = training["largest_loss_difference"]
        if difference > _LOSS_TOLERANCE:
            reasons.append(f"the losses in training differ from the fast engine's by up to {difference:.1e}")
        reasons += [
            f"no rank has called {each['exercise']}"
            for each in functions
            if not each["training_calls"] and not each["proof_calls"]
        ]
    return {"passed": not reasons, "reasons": reasons}
