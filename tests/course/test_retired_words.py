"""Words that the project has retired stay out of its code, comments, messages, notebooks and pages.

`chapters/glossary.md` lists the terms to use. A pattern is a regular expression in which a blank stands for any white
space, so that a phrase is also found when a line breaks inside it. Case does not matter.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from exercises.catalogue import ROOT

PLACES = ("minidist", "exercises", "bench", "tests", "chapters", "docs")
PAGES = ("README.md", "CONTRIBUTING.md")
KINDS = {".py", ".toml", ".ipynb", ".md"}
THIS = Path(__file__).resolve()
MIN_FILES = 300

# (pattern, the term to use, a text that the pattern must find)
RETIRED = (
    (r"\bshar(?:e|es|ed|ing) out\b", "shard, sharded", "gradients are shared out over the ranks"),
    (r"\binto the shared part\b", "entering the tensor-parallel region", "Into the shared part, and out of it"),
    (r"\brows? of (?:parameters|gradients|moments)\b", "flat parameter, flat gradient", "one row of gradients"),
    (r"\bin a row\b(?! (?:of chapter|that is))", "consecutive; flat parameter", "three steps in a row overflow"),
    (r"\bone behind the other\b", "concatenated", "parameters, one behind\n    the other"),
    (r"\bpieces? of memory\b", "buffer, flat parameter", "two pieces of memory"),
    (r"\bnumber formats?\b|\bin which format\b", "dtype", "In which number format each thing is."),
    (r"\bcomputed again\b", "recomputed", "activations are computed again"),
    (
        r"\b(?:give|gives|giving|given) up\b|\bgive_?up\b",
        "freed (a tensor), aborted (a step, a run)",
        "a step is given up",
    ),
    (r"\bbroken off\b", "aborted", "a step that was broken off"),
    (r"\bon (?:its|their) way\b", "in flight", "a bucket on its\n# way"),
    (r"\bhanded over\b", "passed to, added", "the gradient is handed over to the reducer"),
    (r"\bwhat is most\b|\bwhat (?:a|its) kind has at another\b", "peak", "what is most of all kinds"),
    (r"\b(?:who|nobody|everybody) asks\b", "the caller", "The handle for who asked for it, or who asks"),
    (r"\bno number any\b|\bno numbers at all\b", "NaN, non-finite", "is the loss no number any more"),
    (r"\b(?:grad)?sinks?\b", "gradient reducer", "class GradSink:"),
    (r"\bdoors?\b", "collectives", "the door's operations"),
    (r"\bboards?\b", "rank status", "what the boards show"),
    (r"\bjudges?\b", "deadlock detection; check (of an answer)", "the judge of a run"),
    (r"\bstanding\b", "status report, snapshots", "standing = job.last()"),
    (r"\bseats?\b", "live rank", "a seat of the server"),
    (r"\bthis room\b|\brooms of\b|\ba_room\b", "module, package", "the rooms of the house, or this room"),
    (r"\bclinics?\b", "debugging exercise", 'kind = "clinic"'),
    (r"\btells? of\b", "reports", "Run one, tell of it at once"),
    (r"_(?:is|are)_told\b", "is_reported", "def test_a_deadlock_is_told():"),
    (r"\bso many of a\b", "once all ... have been accumulated", "When so many of a piece have come."),
    (r"\blittle use for\b", "valid but pointless", "what a run has little use for"),
    (r"\bis another model\b", "computes a different function", "The first is another model."),
    (r"\bgoe?s? well with\b", "combine with", "stages that do not go well with it"),
    (r"\bnever done in time\b", "never catches up with", "The network is never done in time."),
    (r"\bearns? nothing\b", "idle", "A rank that waits earns nothing."),
    (r"\bnot forgotten\b", "freed, kept", "Emptied and not forgotten."),
    (r"\beach message for itself\b", "ignores contention", "takes each message for itself"),
    (r"\bcan be sent for\b", "there are ... algorithms", "A sum can be sent for in a dozen ways."),
    (r"\bwhat tells are\b", "the ... give it away", "What tells are the copies."),
    (r"\bat another moment\b", "at another time in the step", "has its most at another moment"),
)
PATTERNS = [(re.compile(p.replace(" ", r"[\s#]+"), re.IGNORECASE), term, example) for p, term, example in RETIRED]


def find_retired_words(text: str) -> list[tuple[int, str, str]]:
    """Return (line number, text found, term to use) of every retired word."""
    found = []
    for pattern, term, _ in PATTERNS:
        for match in pattern.finditer(text):
            found.append((text.count("\n", 0, match.start()) + 1, match.group(), term))
    return sorted(found)


def texts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of a file: of every cell, without outputs, if the file is a notebook."""
    name = file.relative_to(ROOT).as_posix()
    if file.suffix != ".ipynb":
        yield name, file.read_text()
        return
    for number, cell in enumerate(json.loads(file.read_text())["cells"]):
        yield f"{name} cell {number}", "".join(cell["source"])


def files_to_search() -> list[Path]:
    """Return the pages and the files of `PLACES`, except this one."""
    files = [ROOT / page for page in PAGES]
    for place in PLACES:
        files += [file for file in sorted((ROOT / place).rglob("*")) if file.suffix in KINDS and file.is_file()]
    hidden = (".ipynb_checkpoints", "__pycache__")
    return [file for file in files if file.resolve() != THIS and not set(file.parts) & set(hidden)]


def test_no_file_uses_a_retired_word():
    files = files_to_search()
    assert len(files) >= MIN_FILES
    found = [
        f"{place}:{line}: {' '.join(word.split())!r}: use {term}"
        for file in files
        for place, text in texts(file)
        for line, word, term in find_retired_words(text)
    ]
    assert not found, "retired words (the terms are in chapters/glossary.md):\n" + "\n".join(found)


@pytest.mark.parametrize(("term", "example"), [(term, example) for _, term, example in PATTERNS])
def test_each_retired_word_is_found(term, example):
    assert term in [found for _, _, found in find_retired_words(f"A first line.\n{example}\n")]


def test_the_line_and_the_words_of_the_field_are_right():
    assert find_retired_words("one\ntwo\nthe last bucket is on its\n# way home\n") == [
        (3, "on its\n# way", "in flight")
    ]
    for text in (
        "keyboard",
        "a shared buffer",
        "the row of chapter 01",
        "indoors",
        "two buckets in flight",
        "format up",
    ):
        assert not find_retired_words(text), text
