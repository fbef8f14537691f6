"""Right and wrong answers to an exercise, which the gate checks: `exercises/<chapter>/answers/<exercise>.toml`.

An answer is a table `[right.NAME]` or `[wrong.NAME]`, and the rest of the course calls it `right_NAME` or `wrong_NAME`:

* `note`: a right answer's difference from the solution; what is wrong with a wrong one, as the solution's list of usual
  wrong answers tells the learner.
* `caught_by` (wrong answers only): the test that must fail. `finding`: the kind of its finding, for an answer that is
  broken rather than wrong ("raised", "deadlock", ...).
* `edits`: a list of `{ find = ..., replace = ... }`. Each `find` is exact text that occurs once in the solution; the
  edits must not overlap. `of = "right_NAME"` lets them change that right answer instead of the solution.
* `text`: the whole program, for an answer that has little in common with the solution.

An answer with neither edits nor a text is generated (see `exercises.generated_answers`).

`[[equivalent]]` lists changes of the solution that do not change its behaviour: see `exercises.mutate`.
"""

import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from exercises.catalogue import Exercise
from minidist.errors import UserError

_WIDTH = 118
_KEYS = {"right": {"note", "of", "edits", "text"}, "wrong": {"note", "caught_by", "finding", "of", "edits", "text"}}
_EQUIVALENT_KEYS = {"was", "becomes", "why"}


@dataclass(frozen=True)
class Edit:
    """One replacement of text that occurs exactly once."""

    find: str
    replace: str


@dataclass(frozen=True)
class Answer:
    """One table of an answers file; the fields are its keys. name: `right_NAME` or `wrong_NAME`."""

    name: str
    note: str = ""
    caught_by: str = ""
    finding: str = ""
    of: str = ""
    edits: tuple[Edit, ...] = ()
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the answer must pass the tests."""
        return self.name.startswith("right_")

    @property
    def is_generated(self) -> bool:
        """Whether the answers file has only its name and note, so that its code is generated."""
        return not self.edits and not self.text


@dataclass(frozen=True)
class Answers:
    """The content of one answers file.

    by_name: right answers first, each group in alphabetical order. equivalents: the reason why a mutant of the solution
    behaves like the solution, by (was, becomes).
    """

    file: Path
    by_name: dict[str, Answer]
    equivalents: dict[tuple[str, str], str]

    @property
    def right(self) -> list[Answer]:
        """The answers that must pass the tests."""
        return [answer for answer in self.by_name.values() if answer.is_right]

    @property
    def wrong(self) -> list[Answer]:
        """The answers that must fail a test."""
        return [answer for answer in self.by_name.values() if not answer.is_right]

    def __getitem__(self, name: str) -> Answer:
        if name not in self.by_name:
            raise UserError(f"{self.file} has no answer {name!r}; it has {', '.join(self.by_name) or 'none'}")
        return self.by_name[name]


def read_answers(exercise: Exercise, file: Path | None = None) -> Answers:
    """Read the answers of an exercise; empty if it has no file. Raises UserError for an invalid file.

    file: instead of the exercise's own.
    """
    file = file or exercise.answers
    try:
        tables = tomllib.loads(file.read_text()) if file.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    if unknown := tables.keys() - {"right", "wrong", "equivalent"}:
        raise UserError(f"{file} has unknown tables {sorted(unknown)}; it may have right, wrong and [[equivalent]]")
    answers = {}
    for group in ("right", "wrong"):
        for name, table in sorted(tables.get(group, {}).items()):
            answers[f"{group}_{name}"] = _parse_answer(file, group, name, table)
    return Answers(file, answers, _parse_equivalents(file, tables.get("equivalent", [])))


def apply_edits(text: str, edits: tuple[Edit, ...], where: str) -> str:
    """Apply edits to `text`; their order does not matter. Raises UserError unless each `find` occurs exactly once."""
    places = []
    for edit in edits:
        if (count := text.count(edit.find)) != 1:
            raise UserError(f"{where}: the text to be edited must occur once, and occurs {count} times:\n{edit.find}")
        start = text.index(edit.find)
        places.append((start, start + len(edit.find), edit.replace))
    places.sort()
    if any(end > start for (_, end, _), (start, _, _) in zip(places, places[1:], strict=False)):
        raise UserError(f"{where}: two edits overlap")
    for start, end, replace in reversed(places):
        text = text[:start] + replace + text[end:]
    return text


def answer_text(answer: Answer, body: str) -> str:
    """Return a file's text: the answer's note as docstring, then the code."""
    note = "\n".join(textwrap.wrap(answer.note, _WIDTH)).replace("\\", "\\\\")
    code = body.strip("\n")
    gap = "\n\n\n" if code.startswith(("def ", "class ", "@")) else "\n\n"
    return f'"""{note}"""{gap}{code}\n'


def _parse_answer(file: Path, group: str, name: str, table: object) -> Answer:
    """Return the answer in the table `[group.name]`. Raises UserError for an invalid table."""
    where = f"{file}: [{group}.{name}]"
    if not isinstance(table, dict) or (unknown := table.keys() - _KEYS[group]):
        problem = f"has unknown keys {sorted(unknown)}" if isinstance(table, dict) else "is not a table"
        raise UserError(f"{where} {problem}; the keys of a {group} answer are {', '.join(sorted(_KEYS[group]))}")
    values = {key: value for key, value in table.items() if key != "edits"}
    if not all(isinstance(value, str) for value in values.values()):
        raise UserError(f"{where}: every key but edits must be a text")
    edits = table.get("edits", [])
    if not isinstance(edits, list) or not all(
        isinstance(edit, dict)
        and edit.keys() == {"find", "replace"}
        and all(isinstance(text, str) for text in edit.values())
        and edit["find"]
        for edit in edits
    ):
        raise UserError(f"{where} edits must be a list of {{ find = ..., replace = ... }}, and find must not be empty")
    if edits and "text" in table:
        raise UserError(f"{where} has both edits and a text")
    return Answer(f"{group}_{name}", **values, edits=tuple(Edit(**edit) for edit in edits))


def _parse_equivalents(file: Path, entries: object) -> dict[tuple[str, str], str]:
    """Return the reasons in the tables `[[equivalent]]`, by (was, becomes). Raises UserError."""
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and entry.keys() == _EQUIVALENT_KEYS
        and all(isinstance(text, str) and text.strip() for text in entry.values())
        for entry in entries
    ):
        keys = ", ".join(sorted(_EQUIVALENT_KEYS))
        raise UserError(f"{file} must hold tables [[equivalent]] with the keys {keys}, none empty")
    return {(entry["was"], entry["becomes"]): entry["why"] for entry in entries}
