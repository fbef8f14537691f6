"""What the tests of an exercise are written with.

@test(points=2, ranks=(1, 2, 3))
def each_index_once(answer, world):
    '''What must be so, in one line for the learner.'''
    expect("the indices of all ranks", got, expected)

A test takes by name what it wants: `answer` (the learner's symbols), `world`, and `network` (a group over all ranks
whose traffic is metered beneath torch). It runs on every rank of each of its world sizes, in fresh processes; the first
thing that is not as it must be ends it, so cases go from small to large.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN = 100
_CALL_SHOWN = 108  # with the word before it a line of the message
_ELEMENTS_SHOWN = 8
_NOTE_BYTES = 400


@dataclass
class Finding:
    """Why a test failed, in the learner's terms.

    kind: "wrong", "unwritten", "raised", "forbidden", "type", "missing", "syntax", "exit", "memory", "hang",
    "deadlock", "died", "printing", "network" (a peer was gone) or "skipped". what: one or more lines. call: the call
    that showed it. line: of the learner's file, source: what it says; printed: the last line that the
    code printed; test: where; rank and size: who found it.
    """

    kind: str
    what: str
    call: str = ""
    expected: str = ""
    got: str = ""
    line: int | None = None
    source: str = ""
    printed: str = ""
    test: str = ""
    rank: int = 0
    size: int = 1


class Wrong(Exception):
    """Raised by `expect` and its like: what the learner's code did is not what was asked."""

    def __init__(self, kind: str, what: str, expected: str = "", got: str = "", case: str = ""):
        super().__init__(what)
        self.kind, self.expected, self.got, self.case = kind, expected, got, case


def test(points: int, ranks: Sequence[int] = (1,)) -> Callable:
    """Mark a function as a test worth `points`, to run on each number of ranks in `ranks`."""
    return lambda function: function


def expect(what: str, got: Any, expected: Any, *, case: str = "", tolerance: float = 0.0) -> None:
    """`got` must be `expected`, element by element, within an absolute `tolerance`.

    case: what to say in place of the last call, when more than one call led here.
    """
    got, expected = _plain(got), _plain(expected)
    if not _same(got, expected, tolerance):
        place = ""
        while max(len(repr(got)), len(repr(expected))) > _SHOWN and _alike(got, expected):
            first = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if not _same(*pair, tolerance))
            got, expected, place = got[first], expected[first], f"{place}[{first}]"
        raise Wrong("wrong", what + (f", at {place}" if place else ""), show(expected), show(got), case)


def indices(value: Any) -> list[int]:
    """The indices that a partition returned, which must be a one-dimensional int64 array."""
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if value is None:
        raise Wrong("type", "nothing came back: is there a `return`?", "a numpy array of int64", "None")
    if kind != "numpy.ndarray" or str(value.dtype) != "int64" or value.ndim != 1:
        array = kind == "numpy.ndarray"
        got = f"{value.dtype} array of shape {value.shape}" if array else f"{type(value).__name__} {show(value)}"
        raise Wrong("type", "the result has the wrong type", "a one-dimensional numpy array of int64", got)
    return value.tolist()


def refuses(error: type[Exception], call: Callable, *args: Any) -> None:
    """The call must raise `error`."""
    try:
        got = call(*args)
    except error:
        return
    raise Wrong("wrong", f"impossible input must be refused with {error.__name__}", error.__name__, show(got))


def predicted(answer: Any, name: str, measured: list[int], size: int) -> None:
    """ANSWERS[name] must be the ranks that were seen to wait for ever, of the `size` ranks of that scenario."""
    answers = answer.ANSWERS
    if type(answers) is not dict:  # one of another class could look up what is expected
        raise Wrong("type", "ANSWERS must be a table of answers, as in the stub", "a dict", type(answers).__name__)
    given, case = answers.get(name), f'ANSWERS["{name}"]'
    if given is None:
        raise Wrong("unwritten", f"not answered yet: {case}")
    if not isinstance(given, Collection) or not all(type(rank) is int for rank in given):
        raise Wrong("type", "an answer is a set of ranks, set() for none", "like {0, 2}", repr(given)[:80], case=case)
    given = sorted(set(given))
    if others := set(given) - set(range(size)):
        what = f"there is no rank {min(others)}: this scenario runs on the ranks 0 to {size - 1}"
        raise Wrong("wrong", what, got=", ".join(map(str, given)), case=case)
    if given == measured:
        return
    if set(given) - set(measured):
        what = "a rank that you name returns: it was seen to come to its end"
    else:
        what = "you name only ranks that wait for ever, but not all of them"
    raise Wrong("wrong", what, got=", ".join(map(str, given)) or "no rank", case=case)


def show(value: Any) -> str:
    """A value in at most a hundred characters."""
    text = " ".join(repr(_plain(value)).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


class Answer:
    """The learner's symbols as attributes. Functions note how they were called, for the message."""

    def __init__(self, module: Any, note: Callable[[str], None]):
        self._module, self._note = module, note

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not inspect.isfunction(value):
            return value

        @functools.wraps(value)
        def called(*args, **kwargs):
            self._note(_call_text(value, args, kwargs))
            try:
                inspect.signature(value).bind(*args, **kwargs)
            except TypeError as error:
                raise Wrong("type", f"{name} must be callable like this, as in the stub: {error}") from None
            return value(*args, **kwargs)

        return called


class Note:
    """The test and the call under way, kept where the parent finds them even when this process dies."""

    def __init__(self, file: str):
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT)
        self.test, self.text = "", ""

    def begin(self, test: str) -> None:
        """Another test has begun, and has called nothing yet."""
        self.test = test
        self("")

    def __call__(self, text: str) -> None:
        self.text = text
        os.pwrite(self._fd, f"{self.test}\n{text}".encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def _call_text(function: Callable, args: Sequence, kwargs: dict) -> str:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        parts = [f"{name}={_brief(value)}" for name, value in bound.items()]
    except TypeError:
        parts = [_brief(value) for value in args]
    text = f"{function.__name__}({', '.join(parts)})"
    return text if len(text) <= _CALL_SHOWN else f"{text[: _CALL_SHOWN - 4]} ..."


def _brief(value: Any) -> str:
    """An argument: a value as `show` has it, an object by the name of its class."""
    kinds = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range, type(None))
    plain = isinstance(value, kinds) or hasattr(value, "tolist")
    return show(_outlined(value)) if plain else f"<{type(value).__name__}>"


@dataclass(frozen=True)
class _Outline:
    """What stands for an array of many elements: its shape and type."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _outlined(value: Any) -> Any:
    """The value with an outline in the place of each large array, also inside lists and tables."""
    if isinstance(value, dict):
        return {key: _outlined(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outlined(item) for item in value]
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) <= _ELEMENTS_SHOWN:
        return value
    return _Outline(f"<{shape} {str(value.dtype).removeprefix('torch.')}>")


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, whole or inside lists and tables."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _alike(got: Any, expected: Any) -> bool:
    return isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected)


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        return _alike(got, expected) and all(_same(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        number = isinstance(got, int | float) and not isinstance(got, bool)
        return number and (got == expected or abs(got - expected) <= tolerance)
    return type(got) is type(expected) and got == expected
