"""Predict, then run: ask a question before a measurement and score the answer after it.

    predict("ring-bytes", "How many bytes does rank 0 send?", answer=None, unit="bytes")
    ...                                                           # a cell that measures
    score_prediction("ring-bytes", sent[0], how="counted")        # or ranks.last, of a cell that never returned

The value is labelled by how it was had: observed in a run, counted by the meter, modelled by a formula (the meter's
bytes of library collectives, too), simulated, or computed from the question's own numbers.

In a notebook in front of a person, a question without an answer shows an input field, and the cells queued behind it
wait. An empty answer stops them once; when the cell runs again it goes on. A program that runs the notebook is asked
nothing and goes on. Only an answer given before the measurement is scored, also in a later session. Scores are stored
in the learner's folder; without one they last as long as the process.
"""

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minidist.errors import UserError
from minidist.tools import progress
from minidist.tools.notebook.result import CellResult

NEVER = "it never returns"
HOW = ("observed", "counted", "modelled", "simulated", "computed")
_NEVER = (NEVER, "never returns", "never", "it never does")
_NUMBERS = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")
_UNSAVED: dict[str, Any] = {}  # in a notebook outside any learner's folder
_ASKED: set[str] = set()  # the questions whose input field this process has shown


class UnansweredError(Exception):
    """Stops the cells queued behind a question that was left empty; the notebook shows its text without traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass
class Prediction:
    """A question to the learner about a measurement, with the answer, the measured value and the score.

    id: the name in `predict` and `score_prediction`. unit: of answer and value. answer: the answer given before the
    measurement, None if there was none. value: the right value, None before the measurement. score: 1 if right, 0 if
    wrong, None if not scored. late_answer: an answer given or changed after the measurement, which is not scored. how:
    how the value was had, one of `HOW`.
    """

    id: str
    question: str
    unit: str = ""
    answer: Any = None
    value: Any = None
    score: int | None = None
    late_answer: Any = None
    how: str = "observed"

    def __repr__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.value is None:
            return self.question + ("" if self.answer is None else f"\nyou expect {self.answer}{unit}")
        lines = [f"{self.question}", f"{self.how}: {self.value}{unit}"]
        if self.answer is not None:
            lines.append(f"you expected {self.answer}{unit}: {'right' if self.score else 'wrong'}")
        if self.late_answer is not None:
            lines.append(f"{self.late_answer}{unit} was entered after the measurement and is not scored")
        return "\n".join(lines)


def predict(
    id: str, question: str, answer: Any = None, *, unit: str = "", file: str | os.PathLike | None = None
) -> Prediction:
    """Record the learner's answer to a question about a later measurement; return both for display.

    id: a name for `score_prediction`, unique in the course. answer: a number, a list, text, or NEVER for a cell that
    hangs; None if the learner has not answered: then a person is asked for it in an input field, unless it was given
    there earlier. unit: shown after the answer and the measured value. file: where scores are stored; progress.json of
    the current learner's folder if None. Raises UnansweredError when the input field is left empty, once.
    """
    prediction = _record_answer(id, question, _to_json_types(answer), unit, file)
    if prediction.answer is None and prediction.value is None and id not in _ASKED and _can_ask():
        _ASKED.add(id)
        prediction = _record_answer(id, question, _ask(unit), unit, file)
        if prediction.answer is None:
            raise UnansweredError(
                "No prediction yet, so the cells below have not run. Run this cell again to go on without one, or "
                "replace None with your prediction first."
            )
    return prediction


def _record_answer(id: str, question: str, answer: Any, unit: str, file: str | os.PathLike | None) -> Prediction:
    """Store an answer, which is late if there is a measured value; an answer of None keeps an earlier one."""
    with _open_predictions(file) as predictions:
        known = _find_prediction(predictions, id)
        kept = Prediction(**{**asdict(known), "question": question, "unit": unit}) if known else None
        prediction = kept or Prediction(id, question, unit)
        if answer is not None and prediction.value is None:
            prediction.answer = answer
        elif answer is not None and answer != prediction.answer:
            prediction.late_answer = answer
        predictions[id] = _to_entry(prediction)
    return prediction


def _can_ask() -> bool:
    """Return whether this is a notebook in front of a person."""
    if (ipython := sys.modules.get("IPython")) is None:
        return False
    from minidist.tools.notebook.frontend import is_interactive  # ranks, which import this module, need no IPython

    return is_interactive(ipython.get_ipython())


def _ask(unit: str) -> str | None:
    """Show an input field and return the answer, without the unit; None if it is empty."""
    text = input(f"Your prediction{', in ' * bool(unit)}{unit}: ").strip()
    return text.removesuffix(unit).strip() or None


def score_prediction(
    id: str,
    value: Any,
    *,
    how: str = "observed",
    tolerance: float = 0.0,
    file: str | os.PathLike | None = None,
) -> Prediction:
    """Record a value, compare the answer given before the measurement with it, and store the score.

    id: as given to `predict`. value: a number, list or text, or the CellResult of a cell that never returned. how: one
    of `HOW`, the label with which the value is shown. tolerance: relative tolerance for numbers; 0 for exact equality.
    file: where scores are stored; progress.json of the current learner's folder if None. Raises UserError when the
    question was never asked.
    """
    if how not in HOW:
        raise UserError(f"how={how!r} says not how the value was had; possible are {', '.join(HOW)}")
    if isinstance(value, CellResult):
        if value.kind not in ("deadlock", "quiet"):
            raise UserError(
                f"the cell of {id!r} did return, so say what was measured: score_prediction({id!r}, number)"
            )
        value = NEVER
    with _open_predictions(file) as predictions:
        prediction = _find_prediction(predictions, id)
        if prediction is None:
            raise UserError(f"{id!r} was not asked: the cell with predict({id!r}, ...) comes first")
        prediction.value = _to_json_types(value)
        prediction.how = how
        if prediction.answer is not None:
            prediction.score = int(_answer_matches(prediction.answer, prediction.value, tolerance))
        predictions[id] = _to_entry(prediction)
    return prediction


def _answer_matches(answer: Any, measured: Any, rel_tol: float = 0.0) -> bool:
    """Return whether an answer equals the measured value.

    Numbers are compared with the relative tolerance `rel_tol`; lists item by item, where the answer may also be text
    ("4 and 1"); text regardless of case, spaces and a final full stop. If the measured value is NEVER (the cell did not
    return), the answers "never", "never returns" and infinity are right, too.
    """
    if isinstance(measured, list):
        answer = _NUMBERS.findall(answer) if isinstance(answer, str) else answer
        return (
            isinstance(answer, list)
            and len(answer) == len(measured)
            and all(_answer_matches(a, m, rel_tol) for a, m in zip(answer, measured, strict=True))
        )
    number, expected_number = _parse_number(answer), _parse_number(measured)
    if measured == NEVER:
        return number == math.inf or _normalize_text(answer) in _NEVER
    if expected_number is not None:
        return number is not None and (
            math.isclose(number, expected_number, rel_tol=rel_tol, abs_tol=0.0)
            or (math.isnan(number) and math.isnan(expected_number))
        )
    return _normalize_text(answer) == _normalize_text(measured)


def _normalize_text(value: Any) -> str:
    """Return the value as lower-case text with single spaces and without a final full stop."""
    return " ".join(str(value).lower().split()).rstrip(".")


def _parse_number(value: Any) -> float | None:
    """Return the value as a number, also from text such as "1,024"; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").replace(" ", "")) if isinstance(value, str) else float(value)
    except ValueError:
        return None


def _to_json_types(value: Any) -> Any:
    """Convert a value to types that JSON can store."""
    if hasattr(value, "tolist"):  # tensors and arrays
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, tuple | list):
        return [_to_json_types(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@contextlib.contextmanager
def _open_predictions(file: str | os.PathLike | None) -> Iterator[dict[str, Any]]:
    """Context with the stored predictions, which are written back at its end."""
    path = progress.find_progress_file(Path.cwd()) if file is None else Path(file)
    if path is None:
        yield _UNSAVED
        return
    try:
        damaged = not isinstance(progress.read_progress(path).get("predictions", {}), dict)
    except UserError:
        damaged = True
    if damaged:
        aside = path.with_suffix(".broken.json")
        os.replace(path, aside)
        print(f"{path} could not be read and was put aside as {aside.name}; scores begin anew")
    with progress.edit_progress(path) as content:
        yield content.setdefault("predictions", {})


def _find_prediction(predictions: dict, id: str) -> Prediction | None:
    """Return the stored prediction of this id; None if there is none, or another version has stored it."""
    entry = predictions.get(id)
    try:
        return Prediction(**{**entry, "id": id}) if entry else None
    except TypeError:  # of another version
        return None


def _to_entry(prediction: Prediction) -> dict[str, Any]:
    """Return the fields of a prediction as they are stored under its id."""
    return {key: value for key, value in asdict(prediction).items() if key != "id"}
