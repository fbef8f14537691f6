"""The interface for writing the tests of an exercise.

@test(points=2, ranks=(1, 2, 3))
def each_index_once(answer, world):
    '''What must be so, in one line for the learner.'''
    expect("the indices of all ranks", got, expected)

A test asks for its arguments by name: `answer` (the learner's symbols), `world`, and `network` (a group
over all ranks whose traffic is recorded beneath torch). It runs on every rank of each of its world sizes, in
new processes, and ends at the first failure, so cases go from small to large.
"""

import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exercises.interpreters import load_answer_file

CONDITION_RANKS = (1, 2, 3, 4, 5, 7)  # the world sizes of tests that call `exercises.conditions.check_conditions`
_SHOWN = 100
_CALL_SHOWN = 108  # characters; fits one line of the message
_ELEMENTS_SHOWN = 8
_NOTE_BYTES = 400
_PLAIN_KINDS = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class Finding:
    """Why a test failed, in the learner's terms.

    kind: "wrong", "unwritten", "raised", "forbidden", "type", "missing", "syntax", "exit", "memory", "hang",
    "deadlock", "died", "printing", "breakpoint", "network" (a peer was gone) or "skipped". what: one or more lines.
    call: the call that failed. line: of the learner's file; source: its text. printed: the last line that the code
    printed. test: its name. rank, size: of the rank that failed.
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
    """Raised by `expect` and similar functions when the learner's code is wrong."""

    def __init__(self, kind: str, what: str, expected: str = "", got: str = "", case: str = ""):
        super().__init__(what)
        self.kind, self.expected, self.got, self.case = kind, expected, got, case


class ProcessFailed(Exception):
    """Raised by a test when another process, which the test has started, made a finding."""

    def __init__(self, finding: Finding):
        super().__init__(finding.what)
        self.finding = finding


def test(points: int, ranks: Sequence[int] = (1,)) -> Callable:
    """Mark a function as a test worth `points`, to run on each number of ranks in `ranks`."""
    return lambda function: function


def expect(what: str, got: Any, expected: Any, *, case: str = "", tolerance: float = 0.0) -> None:
    """Fail unless `got` equals `expected`, element by element, within an absolute `tolerance`.

    what: names the value in the message. case: shown instead of the last call.
    """
    got, expected = _plain(got), _plain(expected)
    if not _same(got, expected, tolerance):
        place = ""
        while max(len(repr(got)), len(repr(expected))) > _SHOWN and _are_comparable(got, expected):
            first = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if not _same(*pair, tolerance))
            got, expected, place = got[first], expected[first], f"{place}[{first}]"
        raise Wrong("wrong", what + (f", at {place}" if place else ""), show(expected), show(got), case)


def index_list(value: Any) -> list[int]:
    """Return a partition's indices as a list. Raises Wrong unless it is a one-dimensional int64 array."""
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if value is None:
        raise Wrong("type", "the function returned None: is a `return` missing?", "a numpy array of int64", "None")
    if kind != "numpy.ndarray" or str(value.dtype) != "int64" or value.ndim != 1:
        array = kind == "numpy.ndarray"
        got = f"{value.dtype} array of shape {value.shape}" if array else f"{type(value).__name__} {show(value)}"
        raise Wrong("type", "the result has the wrong type", "a one-dimensional numpy array of int64", got)
    return value.tolist()


def expect_raises(error: type[Exception], call: Callable, *args: Any) -> None:
    """Fail unless the call raises `error`."""
    try:
        got = call(*args)
    except error:
        return
    raise Wrong("wrong", f"invalid arguments must raise {error.__name__}", error.__name__, show(got))


def expect_prediction(answer: Any, name: str, measured: list[int], size: int) -> None:
    """Fail unless ANSWERS[name] equals the ranks, of `size`, that were measured to wait forever in that scenario."""
    answers = answer.ANSWERS
    if type(answers) is not dict:  # a subclass could look up the expected value
        raise Wrong("type", "ANSWERS must be a dict, as in the stub", "a dict", type(answers).__name__)
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
        what = "a rank in your answer returns: it was observed to finish"
    else:
        what = "the ranks in your answer wait for ever, but so do others"
    raise Wrong("wrong", what, got=", ".join(map(str, given)) or "no rank", case=case)


def expect_invariant(given: Any, violated: str, keys: Sequence[str]) -> None:
    """Fail unless the answer to a debugging exercise names the rule that the original program violates.

    given: its INVARIANT. keys: of all rules.
    """
    if not given:
        raise Wrong("unwritten", "INVARIANT is empty: set it to a key of INVARIANTS")
    if given not in keys:
        raise Wrong("wrong", "INVARIANT is no key of INVARIANTS", f"one of {', '.join(keys)}", show(given))
    if given != violated:
        what = "the original program satisfies this rule; INVARIANT must name the rule that it violates"
        raise Wrong("wrong", what, got=show(given))


def expect_faulty_line(given: Any, faulty_lines: Sequence[tuple[int, str]]) -> None:
    """Fail unless the answer to a debugging exercise names a faulty line, by its number or its text.

    given: its LINE. faulty_lines: number and text of each line of the unchanged stub that may be blamed.
    """
    if not given:
        raise Wrong("unwritten", "LINE is empty: set it to the line's number in the unchanged stub, or to its text")
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise Wrong("type", "LINE must be the number of a line or its text", "an int or a str", show(given))
    if not any(str(given).strip() in (str(number), text) for number, text in faulty_lines):
        raise Wrong("wrong", "the fault is not in this line of the unchanged stub", got=show(given))


def show(value: Any) -> str:
    """Format a value in at most a hundred characters."""
    text = " ".join(repr(_plain(value)).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


class Answer:
    """The learner's symbols as attributes. Calls of its functions and other callables are noted for the message.

    after_call: called when one has returned.
    """

    def __init__(self, module: Any, note: Callable[[str], None], after_call: Callable[[], None] = lambda: None):
        self._module, self._note, self._after_call = module, note, after_call
        self._signatures: dict[str, tuple[Callable, inspect.Signature]] = {}  # reading one takes longer than most calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if inspect.isclass(value) or not callable(value):
            return value

        @functools.wraps(value)
        def called(*args, **kwargs):
            bound = mismatch = None
            try:
                bound = self._signature(name, value).bind(*args, **kwargs).arguments
            except ValueError:  # a built-in function without a signature
                pass
            except TypeError as error:
                mismatch = error
            self._note(_format_call(name, bound, args))
            if mismatch is not None:
                raise Wrong("type", f"{name} must accept these arguments, as in the stub: {mismatch}")
            result = value(*args, **kwargs)
            self._after_call()
            return result

        return called

    def _signature(self, name: str, function: Callable) -> inspect.Signature:
        """Return the signature of the function that has this name now."""
        known, signature = self._signatures.get(name, (None, None))
        if known is not function:
            signature = inspect.signature(function)
            self._signatures[name] = function, signature
        return signature


class RunningCall:
    """The running test and call, stored where the parent can read them even if this process dies."""

    def __init__(self, file: str):
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT)
        self.test, self.text = "", ""

    def begin(self, test: str) -> None:
        """Begin a test, which has called nothing yet."""
        self.test = test
        self("")

    def __call__(self, text: str) -> None:
        self.text = text
        os.pwrite(self._fd, f"{self.test}\n{text}".encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def load_again(answer: Answer) -> Answer:
    """Return the answer as a new process has it: its file is loaded once more, and its module has kept nothing."""
    module, note, after_call = answer._module, answer._note, answer._after_call
    return Answer(load_answer_file(module.__name__, module.__file__), note, after_call)


def learner_globals(answer: Answer) -> dict[str, Any]:
    """Return the global names of the learner's file, for a test to replace one of them."""
    return vars(answer._module)


def learner_file(answer: Answer) -> str:
    """Return the path of the learner's file."""
    return answer._module.__file__


def _format_call(name: str, bound: Mapping[str, Any] | None, args: Sequence) -> str:
    """Format a call. bound: its arguments by name; None if they do not fit or the function has no signature."""
    if bound is None:
        parts = [_format_argument(value) for value in args]
    else:
        parts = [f"{name}={_format_argument(value)}" for name, value in bound.items()]
    text = f"{name}({', '.join(parts)})"
    return text if len(text) <= _CALL_SHOWN else f"{text[: _CALL_SHOWN - 4]} ..."


def _format_argument(value: Any) -> str:
    """Format an argument: a value with `show`, an object by the name of its class."""
    kinds = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range, type(None))
    plain = isinstance(value, kinds) or hasattr(value, "tolist")
    return show(_outline_large_arrays(value)) if plain else f"<{type(value).__name__}>"


@dataclass(frozen=True)
class _Outline:
    """A placeholder for a large array: its shape and dtype."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _outline_large_arrays(value: Any) -> Any:
    """Replace each large array by an outline, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _outline_large_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outline_large_arrays(item) for item in value]
    shape = tuple(value.shape) if hasattr(value, "tolist") else ()
    if math.prod(shape) <= _ELEMENTS_SHOWN:
        return value
    return _Outline(f"<{shape} {str(value.dtype).removeprefix('torch.')}>")


def _plain(value: Any) -> Any:
    """Convert arrays and tensors to lists, also inside lists and dictionaries.

    The answer may have made the value, so no method of a class of its own is called: it could return what is expected.
    Raises Wrong for a subclass of an array or a tensor.
    """
    kind = type(value)
    if kind in _PLAIN_KINDS:
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in dict.items(value)}
    if isinstance(value, list):
        return [_plain(item) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in tuple.__iter__(value)]
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    for builtin in (set, frozenset):
        if isinstance(value, builtin):
            return builtin(builtin.__iter__(value))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        check_tensor_class(value)
        return torch._C.TensorBase.tolist(value)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if getattr(numpy, kind.__name__, None) is not kind:
            raise Wrong("type", "the result must be an array of numpy itself", "numpy.ndarray", kind.__name__)
        return value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def check_tensor_class(value: Any) -> None:
    """Raise Wrong if a tensor has a class of the answer's own, whose methods could return anything."""
    torch, kind = sys.modules["torch"], type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise Wrong("type", "the result must be a tensor of torch's own class", "torch.Tensor", kind.__name__)


def _are_comparable(got: Any, expected: Any) -> bool:
    """Return whether both are lists of equal length, whose items can be compared."""
    return isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected)


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two plain values are equal.

    Numbers are of exactly Python's classes: others could claim any equality.
    """
    if isinstance(expected, list):
        if not _are_comparable(got, expected):
            return False
        if set(map(type, got)) == {float} == set(map(type, expected)):
            # Most are equal: that is seen here, without a call per number.
            differences = map(abs, map(operator.sub, got, expected))
            if all(map(float(tolerance).__ge__, differences)):
                return True
        return all(_same(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        is_dict = type(got) is dict and got.keys() == expected.keys()
        return is_dict and all(_same(got[key], item, 0.0) for key, item in expected.items())
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        if type(got) not in (int, float):
            return False
        # A difference of a float and a large integer is rounded; a comparison of them is not.
        return got == expected or (tolerance > 0 and abs(got - expected) <= tolerance)
    return type(got) is type(expected) and got == expected
