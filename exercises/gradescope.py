"""Grades one submission on Gradescope: `python -m exercises.gradescope SUBMISSION RESULTS.json [EXERCISE ...]`.

The zip file that `python -m exercises release FOLDER --gradescope FILE.zip` writes runs this. The results are in
Gradescope's format: for each exercise a test with `score`, `max_score`, `status` and the message as `output`.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exercises.catalogue import ROOT, Catalogue
from exercises.grade import Grader, Record, Records
from exercises.submissions import read_submission
from minidist.errors import UserError
from minidist.tools.cli import run_to_exit_code
from minidist.tools.launch.threads import usable_cores

_STATES = {"missing": "not handed in", "error": "not graded: tell your instructor"}


def as_results(records: Sequence[Record], catalogue: Catalogue, protections: Sequence[str]) -> dict[str, Any]:
    """Return the content of Gradescope's results.json."""
    tests = []
    for record in records:
        said = "passed" if record.verdict == "passed" else record.message or _STATES.get(record.verdict, record.verdict)
        failed = f"{record.test}: " if record.test else ""
        tests.append(
            {
                "name": f"{catalogue[record.exercise].section} {record.exercise}",
                "score": record.points,
                "max_score": record.of,
                "status": "passed" if record.verdict == "passed" else "failed",
                "output": f"{failed}{_STATES.get(record.verdict, said)}",
                "output_format": "text",
                "visibility": "visible",
            }
        )
    return {
        "output": "\n".join(protections),
        "output_format": "text",
        "stdout_visibility": "hidden",
        "execution_time": round(sum(record.seconds for record in records)),
        "tests": tests,
    }


def grade_submission(submission: Path, results: Path, names: Sequence[str], kind: str = "auto") -> None:
    """Grade the submission in a folder and write results.json."""
    catalogue = Catalogue(ROOT)
    chosen = [catalogue[name] for name in names] if names else list(catalogue.values())
    handed_in = [read_submission(submission, "student", catalogue)]
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder, "records.jsonl"))
        grader = Grader(catalogue, records, kind, usable_cores() + 1)
        grader.run(handed_in, chosen)
        done = records.of(handed_in, chosen)
    results.write_text(json.dumps(as_results(done, catalogue, grader.protections), indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        if len(words) < 2:
            raise UserError("give the folder of the submission and the file for the results, then exercises if not all")
        grade_submission(Path(words[0]), Path(words[1]), words[2:])
        return 0

    return run_to_exit_code(run, "exercises.gradescope")


if __name__ == "__main__":
    sys.exit(main())
