"""Mistakes that can be made in any solution: each wraps the solution's functions, or the collectives that they call.

A mutant changes one expression, and a catalogued wrong answer is written for one exercise. These mistakes are the same
for all exercises: a result kept from an earlier call, a group remembered, a narrower dtype, an early return, a handle
that nobody waits for. `python -m exercises gate --mistakes` makes each of them in every solution and lists those that
the tests do not notice. A mistake without effect in an exercise does not count: its wrapper calls `_effect()` where it
changes something, and a second program, in which that raises, tells the two apart.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exercises import stubs
from exercises.catalogue import Exercise
from exercises.check import check

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer

_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "recv"),
    "batch_send_recv",
)

# By name: what is wrong, and the body of the wrapper. `call` is the wrapped function; `remembered` is a dictionary of
# its own, which lives as long as the module; `tensors` are the floating-point tensors among its arguments.
_IN_FUNCTIONS = {
    "first_result_again": (
        "returns the result of its first call again",
        """
        if "result" in remembered:
            _effect()
        else:
            remembered["result"] = call(*args, **kwargs)
        return remembered["result"]
        """,
    ),
    "early_return_for_zeros": (
        "returns at once if all elements are zero, and leaves the other ranks waiting",
        """
        if tensors and not any(bool(each.any()) for each in tensors):
            _effect()
            return _unchanged(call, tensors)
        return call(*args, **kwargs)
        """,
    ),
    "early_return_on_the_last_rank": (
        "the last of three or more ranks returns at once",
        """
        groups = [each for each in _leaves((args, kwargs)) if isinstance(each, _Group)]
        if groups and groups[0].size > 2 and groups[0].rank == groups[0].size - 1:
            _effect()
            return _unchanged(call, tensors)
        return call(*args, **kwargs)
        """,
    ),
    "seeds_torch": (
        "seeds the global random state of torch",
        """
        _effect()
        _torch.manual_seed(0)
        return call(*args, **kwargs)
        """,
    ),
    "float64_result": (
        "returns float64, whatever it was given",
        """
        return _map(lambda each: _converted(each, _torch.float64), call(*args, **kwargs))
        """,
    ),
    "float32_result": (
        "returns float32, whatever it was given",
        """
        return _map(lambda each: _converted(each, _torch.float32), call(*args, **kwargs))
        """,
    ),
    "rounded_to_bfloat16": (
        "rounds its results to bfloat16",
        """
        versions = [each._version for each in tensors]
        result = call(*args, **kwargs)
        for each, version in zip(tensors, versions, strict=True):
            if each._version != version:
                _round_(each)
        _map(_round_, result)
        return result
        """,
    ),
    "argument_changed": (
        "changes an argument that it should only read",
        """
        versions = [each._version for each in tensors]
        result = call(*args, **kwargs)
        shown = {id(each) for each in _leaves(result)}
        for each, version in zip(tensors, versions, strict=True):
            if each._version == version and each.numel() and id(each) not in shown:
                _effect()
                with _torch.no_grad():
                    each.add_(1)
                break
        return result
        """,
    ),
    "result_buffer_reused": (
        "returns the same memory from every call",
        """
        def reused(each):
            if not isinstance(each, _torch.Tensor):
                return each
            key = each.shape, each.dtype
            if key not in remembered:
                remembered[key] = each.detach().clone()
            else:
                _effect()
            return remembered[key].copy_(each.detach())

        return _map(reused, call(*args, **kwargs))
        """,
    ),
    "first_group_again": (
        "uses the group of its first call in all later ones",
        """
        def first(each):
            if not isinstance(each, _Group):
                return each
            known = remembered.setdefault("group", each)
            if known is not each:
                _effect()
            return known

        return call(*_map(first, args), **_map(first, kwargs))
        """,
    ),
    "contiguous_only": (
        "fails for a tensor that is not contiguous",
        """
        for each in tensors:
            if not each.is_contiguous():
                _effect()
            each.view(-1)
        return call(*args, **kwargs)
        """,
    ),
    "nan_taken_for_zero": (
        "takes NaN for zero",
        """
        for each in tensors:
            if bool(each.isnan().any()):
                _effect()
                with _torch.no_grad():
                    each.nan_to_num_(nan=0.0, posinf=_torch.inf, neginf=-_torch.inf)
        return call(*args, **kwargs)
        """,
    ),
    "wrong_on_five_ranks": (
        "gives wrong numbers on five ranks",
        """
        groups = [each for each in _leaves((args, kwargs)) if isinstance(each, _Group)]
        return _disturbed(call, tensors, args, kwargs, bool(groups) and groups[0].size == 5)
        """,
    ),
    "wrong_for_many_elements": (
        "gives wrong numbers for more than 10,000 elements",
        """
        return _disturbed(call, tensors, args, kwargs, any(each.numel() > 10_000 for each in tensors))
        """,
    ),
    "result_requires_gradients": (
        "returns tensors that require gradients",
        """
        def required(each):
            if isinstance(each, _torch.Tensor) and each.is_floating_point() and not each.requires_grad:
                _effect()
                return each.detach().clone().requires_grad_()
            return each

        return _map(required, call(*args, **kwargs))
        """,
    ),
    "arguments_kept": (
        "keeps the tensors of every call",
        """
        if tensors:
            _effect()
        remembered.setdefault("kept", []).extend(tensors)
        return call(*args, **kwargs)
        """,
    ),
}
# The same for the collectives that the solution has imported.
_IN_COLLECTIVES = {
    "sent_in_bfloat16": (
        "sends bfloat16, whatever the dtype is",
        """
        if kwargs.get("async_op") or not tensors or all(each.dtype.itemsize <= 2 for each in tensors):
            return call(*args, **kwargs)
        _effect()
        narrow = {id(each): each.bfloat16() for each in tensors}
        replace = lambda each: narrow.get(id(each), each)
        result = call(*_map(replace, args), **_map(replace, kwargs))
        with _torch.no_grad():
            for each in tensors:
                each.copy_(narrow[id(each)])
        return result
        """,
    ),
    "not_waited_for": (
        "does not wait for its collectives",
        """
        if kwargs.get("async_op"):
            return call(*args, **kwargs)
        _effect()
        call(*args, **kwargs, async_op=True)
        """,
    ),
}

_PROGRAM = '''


import functools as _functools
from minidist.comm import Group as _Group
import torch as _torch


def _effect():
    {effect}


def _map(change, value):
    if isinstance(value, dict):
        return {{key: _map(change, each) for key, each in value.items()}}
    if type(value) in (list, tuple):
        return type(value)(_map(change, each) for each in value)
    return change(value)


def _leaves(value):
    found = []
    _map(found.append, value)
    return found


def _tensors(value):
    return [each for each in _leaves(value) if isinstance(each, _torch.Tensor) and each.is_floating_point()]


def _unchanged(call, tensors):
    """What a function returns that has done nothing."""
    returns = call.__annotations__.get("return")
    return None if returns in (None, "None") or not tensors else tensors[0]


def _converted(each, dtype):
    if not isinstance(each, _torch.Tensor) or not each.is_floating_point() or each.dtype == dtype:
        return each
    _effect()
    return each.to(dtype)


def _round_(each):
    if isinstance(each, _torch.Tensor) and each.is_floating_point():
        rounded = each.detach().bfloat16().to(each.dtype)
        if not _torch.equal(rounded, each.detach()):
            _effect()
            each.data.copy_(rounded)


def _disturbed(call, tensors, args, kwargs, when):
    versions = [each._version for each in tensors]
    result = call(*args, **kwargs)
    found = [each for each, version in zip(tensors, versions) if each._version != version] + _tensors(result)
    if when and found and found[0].numel():
        _effect()
        with _torch.no_grad():
            found[0].view(-1)[-1:].add_(1) if found[0].is_contiguous() else found[0].add_(1)
    return result


def _with_mistake(call):
    remembered = {{}}

    @_functools.wraps(call)
    def wrapper(*args, **kwargs):
        tensors = _tensors((args, kwargs))
{body}

    return wrapper


for _name in {names}:
    _value = globals()[_name]
    if isinstance(_value, type):
        for _method, _function in list(vars(_value).items()):
            if isinstance(_function, type(_with_mistake)) and not _method.startswith("_"):
                setattr(_value, _method, _with_mistake(_function))
    elif callable(_value):
        globals()[_name] = _with_mistake(_value)
'''


@dataclass(frozen=True)
class Outcome:
    """What became of one mistake in one exercise. killed_by: the test that failed; "" if it survived.

    has_effect: whether it changed anything in any test; always true of a killed one.
    """

    mistake: str
    note: str
    killed_by: str
    has_effect: bool


def make_mistakes(exercise: Exercise, raises: bool = False) -> dict[str, tuple[str, str]]:
    """Return {name: (what is wrong, program)} of the mistakes made in an exercise's solution; {} if it is no piece.

    raises: make programs that raise an error in place of the mistake.
    """
    if exercise.kind != "piece":
        return {}
    solution = stubs.solution_code(exercise)
    names = {
        alias.name for node in ast.parse(solution).body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    imported = [name for name in _COLLECTIVES if name in names]
    effect = 'raise RuntimeError("the mistake has an effect")' if raises else "pass"
    made = {}
    for mistakes, names in ((_IN_FUNCTIONS, list(exercise.symbols)), (_IN_COLLECTIVES, imported)):
        for name, (note, body) in mistakes.items() if names else ():
            made[name] = note, solution + _PROGRAM.format(effect=effect, names=names, body=body.strip("\n"))
    return made


def try_mistakes(exercise: Exercise, server: "RankServer", folder: Path) -> list[Outcome]:
    """Check every mistake made in an exercise's solution; folder: for the programs."""
    harmless = make_mistakes(exercise, raises=True)
    outcomes = []
    for name, (note, text) in make_mistakes(exercise).items():
        killed_by = _first_failure(exercise, text, server, folder)
        has_effect = bool(killed_by or _first_failure(exercise, harmless[name][1], server, folder))
        outcomes.append(Outcome(name, note, killed_by, has_effect))
    return outcomes


def run_mistakes(exercises: list[Exercise], server: "RankServer", folder: Path) -> bool:
    """Try the mistakes in these exercises and print a line for each; return whether all that have an effect died."""
    outcomes = []
    for exercise in exercises:
        found = [each for each in try_mistakes(exercise, server, folder) if each.has_effect]
        alive = [each for each in found if not each.killed_by]
        outcomes += found
        if found:
            print(f"{exercise.name:<26}{len(found) - len(alive):3} of {len(found):2} mistakes are caught", flush=True)
        for each in alive:
            print(f"    {each.mistake} survives: {each.note}", flush=True)
    dead = sum(bool(each.killed_by) for each in outcomes)
    print(f"{'all':<26}{dead:3} of {len(outcomes)} mistakes are caught")
    return bool(outcomes) and dead == len(outcomes)


def _first_failure(exercise: Exercise, text: str, server: "RankServer", folder: Path) -> str:
    """Return the name of the first test that a program fails; "" if it passes all."""
    file = folder / f"{exercise.name}.py"
    file.write_text(text)
    failed = [
        result
        for result in check(exercise, file, server, stop=True).results
        if result.finding and result.finding.kind != "skipped"
    ]
    return failed[0].id if failed else ""
