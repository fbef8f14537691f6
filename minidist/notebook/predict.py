"""Predict, then run: a question before the measurement, its score after it.

    predict("ring-bytes", "How many bytes does rank 0 send?", answer=None, unit="bytes")
    ...                                                           # a cell that measures
    measured("ring-bytes", ranks.last)                            # or a number that the meter gave

Nothing here blocks or raises because of what was answered. Only an answer that was there before the measurement is
scored, also in a later session.
"""

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minidist.errors import UserError
from minidist.notebook.result import CellResult

NEVER = "it never returns"
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Prediction:
    """A question and what became of it.

    answer: as given, None for none. value: as measured, None before. score: 1 right, 0 wrong, None for not scored.
    late: an answer that came after the measurement, or changed after it.
    """

    id: str
    question: str
    unit: str = ""
    answer: Any = None
    value: Any = None
    score: int | None = None
    late: Any = None

    def __repr__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        answer = "no answer yet: put yours in place of answer=None, or go on" if self.answer is None else None
        answer = answer or f"you expect {self.answer}{unit}"
        if self.value is None:
            return f"{self.question}\n{answer}"
        told = [f"{self.question}", f"measured: {self.value}{unit}"]
        if self.answer is not None:
            told.append(f"you expected {self.answer}{unit}: {'right' if self.score else 'not so'}")
        elif self.late is None:
            told.append("no answer was given before")
        if self.late is not None:
            told.append(f"{self.late}{unit} was said after the measurement and is not scored")
        return "\n".join(told)


def predict(
    id: str, question: str, answer: Any = None, *, unit: str = "", file: str | os.PathLike | None = None
) -> Prediction:
    """Ask a question, or take in the answer to it: a number, a list of ranks, words, or NEVER.

    file: where scores are kept, `work/progress.json` of the course when None.
    """
    path, progress = _opened(file)
    known = _known(progress, id)
    answer = _plain(answer)
    kept = Prediction(**{**asdict(known), "question": question, "unit": unit}) if known else None
    prediction = kept or Prediction(id, question, unit)
    if prediction.value is None:
        prediction.answer = answer
    elif answer is not None and answer != prediction.answer:
        prediction.late = answer
    _keep(path, progress, prediction)
    return prediction


def measured(id: str, value: Any, *, tolerance: float = 0.0, file: str | os.PathLike | None = None) -> Prediction:
    """Take in what was measured, and score the answer that was there before.

    value: a number, list or words; of a CellResult, NEVER if the cell never returned, else its result must be given.
    tolerance: relative, for numbers; 0 for exactly.
    Raises UserError when the question was never asked.
    """
    if isinstance(value, CellResult):
        if value.kind not in ("deadlock", "quiet"):
            raise UserError(f"the cell of {id!r} did return, so say what was measured: measured({id!r}, number)")
        value = NEVER
    path, progress = _opened(file)
    prediction = _known(progress, id)
    if prediction is None:
        raise UserError(f"{id!r} was not asked: the cell with predict({id!r}, ...) comes first")
    prediction.value = _plain(value)
    if prediction.answer is not None:
        prediction.score = int(agree(prediction.answer, prediction.value, tolerance))
    _keep(path, progress, prediction)
    return prediction


def agree(answer: Any, value: Any, tolerance: float = 0.0) -> bool:
    """Whether an answer is right: numbers within the relative tolerance, lists item by item, words without regard to
    capitals and spaces."""
    if isinstance(value, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(value)
            and all(agree(a, v, tolerance) for a, v in zip(answer, value, strict=True))
        )
    number, wanted = _number(answer), _number(value)
    if wanted is not None:
        return number is not None and math.isclose(number, wanted, rel_tol=tolerance, abs_tol=0.0)
    return " ".join(str(answer).lower().split()) == " ".join(str(value).lower().split())


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").replace(" ", "")) if isinstance(value, str) else float(value)
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    """The value as JSON can keep it."""
    if hasattr(value, "tolist"):  # tensors and arrays
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _opened(file: str | os.PathLike | None) -> tuple[Path, dict]:
    path = Path(file) if file is not None else _ROOT / "work" / "progress.json"
    try:
        progress = json.loads(path.read_text())
    except FileNotFoundError:
        return path, {}
    except ValueError:
        progress = None
    if isinstance(progress, dict) and isinstance(progress.get("predictions", {}), dict):
        return path, progress
    aside = path.with_suffix(".broken.json")
    os.replace(path, aside)
    print(f"{path} could not be read and was put aside as {aside.name}; scores begin anew")
    return path, {}


def _known(progress: dict, id: str) -> Prediction | None:
    entry = progress.get("predictions", {}).get(id)
    try:
        return Prediction(**{**entry, "id": id}) if entry else None
    except TypeError:  # of another version
        return None


def _keep(path: Path, progress: dict, prediction: Prediction) -> None:
    """Write the file whole or not at all; what others keep in it stays."""
    entry = {key: value for key, value in asdict(prediction).items() if key != "id"}
    progress.setdefault("predictions", {})[prediction.id] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as out:
            json.dump(progress, out, indent=1)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
