"""Conditions under which every answer must be right, the same for all exercises.

An exercise declares what its answer takes (a strategy for each argument), how it is called and what one process gets:
see `Declaration`. `check_conditions` then calls the answer under every condition that applies: sizes, dtypes and
numbers that no narrower dtype represents, memory layouts, non-finite numbers, choices, groups that are some of the
ranks, repeated and interleaved calls. After each call it compares results, result dtypes, unchanged inputs, memory that
results share with inputs, the dtype sent to other ranks, and the bits of replicas. An answer that declares `Growth` is
also called with arguments of two sizes, between which its memory may grow by so much. The tests of the exercise itself
are left for what is particular to it.
"""

import functools
import gc
import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from exercises.observations import PeakMemory
from exercises.testing import Wrong, check_tensor_class, show
from minidist.comm import all_gather_object
from minidist.errors import format_count
from minidist.tools.recording_backend import wait_until_dropped

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DIVIDED_SIZE = 4  # the world size whose ranks are also divided into two groups
_MARGIN = 3  # elements before and after a tensor that is a slice of a longer one
_SENTINEL = 99
_LARGE = 20_011
_MEASUREMENTS = 5  # of memory, at most: the least counts
_DROPPED_S = 0.5  # how long to wait for a backend's thread to drop what it was passed
# Integers whose sum over seven ranks is exact in the dtype, and which no narrower dtype represents.
_OFFSET = {
    torch.float64: 2**40,
    torch.float32: 2**18,
    torch.float16: 257,
    torch.bfloat16: 1,
    torch.int64: 2**54,
}


@dataclass(frozen=True)
class Tensors:
    """Strategy: one tensor per rank.

    numel: its number of elements, given the number of ranks. dtypes: the first is that of most calls. layouts: those
    that it may have besides a contiguous vector: a slice of a longer tensor, a transposed matrix, a tensor without
    dimensions. sizes: whether other numbers of elements are valid; with `columns`, the shape is (numel, columns).
    non_finite: whether NaN and infinity are valid. differs: whether ranks have different numbers. like: the name of an
    earlier argument whose size, shape and dtype this one always has.
    All ranks get tensors of one size. If sizes differ by rank, let a `Drawn` argument be the rows that a rank leaves
    out, and `Declaration.call` pass the others: under every condition the ranks then have different sizes.
    """

    numel: Callable[[int], int] = lambda ranks: 2 * ranks + 1
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, torch.int64)
    layouts: tuple[str, ...] = ("slice", "transposed", "scalar")
    sizes: bool = True
    columns: int = 0
    non_finite: bool = True
    differs: bool = True
    like: str = ""

    def conditions(self, ranks: int) -> dict[str, dict]:
        """Return the settings of each condition, by its description."""
        found: dict[str, dict] = {}
        for dtype in () if self.like else self.dtypes[1:]:
            found[f"{_format_dtype(dtype)} numbers that no narrower dtype represents"] = {"dtype": dtype}
        if self.sizes and not self.like:
            for numel in dict.fromkeys((0, 1, ranks - 1, ranks, ranks + 1, 3 * ranks + 2, _LARGE)):
                found[f"a tensor of {numel} elements on {ranks} ranks"] = {"numel": numel}
        if "slice" in self.layouts:
            found["a slice of a longer tensor"] = {"layout": "slice"}
        if "transposed" in self.layouts and not self.like:
            found["a transposed matrix"] = {"layout": "transposed"}
        if "scalar" in self.layouts and self.sizes and not self.like:
            found["a tensor without dimensions"] = {"layout": "scalar", "numel": 1}
        if self.dtypes[0].is_floating_point:
            found["a tensor that requires gradients, under torch.no_grad()"] = {"requires_grad": True}
        if self.non_finite:
            found["NaN in one element of one rank"] = {"special": math.nan}
            found["infinity in one element of one rank"] = {"special": math.inf}
        found["zeros on one rank"] = {"zeros": True}
        return found

    def make(self, rank: int, ranks: int, settings: Mapping[str, Any], draw: int) -> Tensor:
        """Return the tensor of one rank under a condition.

        settings: of the condition, as from `conditions`. draw: a number; other numbers give other elements.
        """
        dtype, numel = settings.get("dtype", self.dtypes[0]), settings.get("numel", self.numel(ranks))
        layout = settings.get("layout", "contiguous")
        shape = (numel, self.columns) if self.columns else (numel,)
        if layout in ("transposed", "matrix") and not self.columns:
            shape = (3, max(2, -(-numel // 3)))  # the transpose of a vector would be contiguous
        count = math.prod(shape)
        seed = rank if self.differs else 0
        numbers = (torch.arange(count) * (seed + 3) + 5 * seed + draw) % 23 + _OFFSET.get(dtype, 1)
        flat = numbers.to(dtype)
        if settings.get("zeros") and (rank == ranks - 1 or not self.differs):
            flat.zero_()
        if "special" in settings and count and rank == ranks - 1:
            flat[count // 2] = settings["special"]
        if layout == "scalar":
            return flat.reshape(())
        if layout == "transposed":
            return flat.reshape(shape[::-1]).t()
        if settings.get("requires_grad"):
            return flat.reshape(shape).requires_grad_()
        if layout == "slice":
            buffer = torch.full((count + 2 * _MARGIN,), _SENTINEL, dtype=dtype)
            buffer[_MARGIN : _MARGIN + count] = flat
            return buffer[_MARGIN : _MARGIN + count].view(shape)
        return flat.reshape(shape)


@dataclass(frozen=True)
class Choices:
    """Strategy: one of a few values, equal on all ranks. The first is that of most calls."""

    values: tuple[Any, ...]

    def conditions(self, ranks: int) -> dict[str, dict]:
        """Return the settings of each condition, by its description: one for each value but the first."""
        return {f"the value {show(value)}": {"value": value} for value in self.values[1:]}

    def make(self, rank: int, ranks: int, settings: Mapping[str, Any], draw: int) -> Any:
        """Return the value under a condition; the first one without settings."""
        return settings.get("value", self.values[0])


@dataclass(frozen=True)
class Drawn:
    """Strategy: any other value. function: (rank, ranks, draw) -> value; draw is a number from 0.

    draws: {description: number} of the draws that are conditions of their own.
    """

    function: Callable[[int, int, int], Any]
    draws: Mapping[str, int] = field(default_factory=dict)

    def conditions(self, ranks: int) -> dict[str, dict]:
        """Return the settings of each condition, by its description: one for each of `draws`."""
        return {description: {"draw": number} for description, number in self.draws.items()}

    def make(self, rank: int, ranks: int, settings: Mapping[str, Any], draw: int) -> Any:
        """Return the value of one rank under a condition."""
        return self.function(rank, ranks, settings.get("draw", 0))


@dataclass(frozen=True)
class Growth:
    """How much memory an answer may allocate, by the size of its arguments.

    sizes: the settings of each argument's strategy, like {"tensor": {"numel": 1000}}, at a smaller and a larger size.
    peak_bytes: (arguments of this rank, number of ranks) -> the peak of memory during the call, beyond its arguments;
    None: any peak. kept_bytes: the same for what is allocated after it: the result, and what autograd keeps for
    backward. Only the differences between the two sizes are compared, so that neither constant terms nor the rounding
    of small sizes matter. requires_grad: the arguments that require gradients in these calls; the peak is then that of
    the call and of backward from its results. call: in place of the declaration's, if another result is to be kept.
    """

    sizes: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
    peak_bytes: Callable[[dict[str, Any], int], float] | None
    kept_bytes: Callable[[dict[str, Any], int], float]
    requires_grad: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Declaration:
    """What `check_conditions` must know of an answer.

    inputs: the strategy of each argument. call: (answer, group, **arguments) -> result, any nesting of tensors and
    plain values. reference: (arguments of every rank in the group, a list of dictionaries; rank) -> the expected
    result, computed without communication and of the expected dtype; or an exception class that must be raised.
    changes: the arguments that the answer may change. shares: whether the result may share memory with the arguments.
    replicas: whether all ranks must get the same bits. roundings: how many operations, each rounded to the result's
    dtype, lie between the reference and an answer in another order; 0: the numbers are exact.
    wire: whether tensors must be sent in the dtype of the (first) tensor argument. more_dtypes: other dtypes that may
    be sent. max_bytes: (arguments of every rank) -> the bytes that all ranks together may send; None: any number.
    has_parameters: whether the result depends on trainable parameters, and so requires gradients.
    aliases: arguments, of equal shapes and dtypes, that may all be one tensor. growth: of the memory of a call.
    """

    inputs: Mapping[str, Tensors | Choices | Drawn]
    call: Callable[..., Any]
    reference: Callable[[list[dict[str, Any]], int], Any]
    changes: tuple[str, ...] = ()
    shares: bool = False
    replicas: bool = False
    roundings: int = 0
    wire: bool = True
    more_dtypes: tuple[torch.dtype, ...] = ()
    max_bytes: Callable[[list[dict[str, Any]]], int] | None = None
    has_parameters: bool = False
    aliases: tuple[str, ...] = ()
    growth: Growth | None = None


# The kinds of conditions, by the setting of a strategy that makes them, and those that have none.
_KIND_OF_SETTING = {
    "dtype": "dtypes",
    "numel": "sizes",
    "layout": "memory layouts",
    "requires_grad": "gradients",
    "special": "NaN and infinity",
    "zeros": "zeros",
    "value": "choices",
    "draw": "special arguments",
}
USUAL, REPEATED, DIVIDED, KEPT = "usual arguments", "repeated calls", "subgroups", "memory between calls"
ALIASED, GROWN = "one tensor for several arguments", "growth of memory"
KINDS = (USUAL, *_KIND_OF_SETTING.values(), ALIASED, REPEATED, DIVIDED, KEPT, GROWN)
_NEEDED_BY = {REPEATED: (USUAL,), KEPT: (USUAL, REPEATED)}  # what must be called before these can be checked


@dataclass(frozen=True)
class Condition:
    """One call of the answer. settings: of each argument's strategy. draw: a number that selects the elements."""

    description: str
    kind: str
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draw: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call that has returned. copy: of the result. sent_bytes: by this rank. max_bytes: for all ranks together."""

    case: str
    result: Any = None
    copy: Any = None
    sent_bytes: int = 0
    max_bytes: int | None = None


def check_conditions(declaration: Declaration, answer: Any, world: Any, network: Any) -> None:
    """Call the answer under every condition that applies to it on this number of ranks; raise Wrong at the first error.

    Every rank must call this with an equal declaration.
    """
    earlier: list[Call] = []
    arguments: list[weakref.ref] = []
    selected = network.condition_kind

    def is_selected(kind: str) -> bool:
        return selected in (None, kind) or kind in _NEEDED_BY.get(selected, ())

    for condition in _conditions(declaration, world.size, is_selected):
        earlier.append(_check(declaration, condition, answer, network.group, network, arguments))
    _compare_ranks(declaration, earlier, network.group)
    if world.size == _DIVIDED_SIZE and is_selected(DIVIDED):
        group, description = network.divided_group, "a group of ranks {0, 2}, beside another of {1, 3}"
        # Other numbers than in the other group: a result that takes in its ranks is wrong.
        conditions = [Condition(description, DIVIDED, draw=2 * draw + min(group.ranks)) for draw in (0, 1)]
        divided = [_check(declaration, condition, answer, group, network, arguments) for condition in conditions]
        _compare_ranks(declaration, divided, group)
        divided.clear()
    for call in earlier if is_selected(KEPT) else ():
        if not _equal_bits(call.result, call.copy):
            what = "a later call has changed the result of an earlier one"
            raise Wrong("wrong", what, show(call.copy), show(call.result), case=call.case)
    calls, call = len(earlier), None
    earlier.clear()
    if not declaration.shares and is_selected(KEPT):
        gc.collect()
        if kept := sum(each() is not None for each in arguments):
            what = f"your code still references {kept} tensors from {calls} calls that have returned: memory grows"
            raise Wrong("wrong", what, "no tensor of an earlier call", f"{kept} of {len(arguments)}")
    if declaration.growth is not None and is_selected(GROWN):
        _check_growth(declaration, declaration.growth, answer, network.group)


def _conditions(declaration: Declaration, ranks: int, is_selected: Callable[[str], bool]) -> list[Condition]:
    """Return the conditions: a plain call, each condition of each argument, and a plain call with other numbers."""
    found = [Condition("the usual arguments", USUAL)]
    for name, strategy in declaration.inputs.items():
        for description, settings in strategy.conditions(ranks).items():
            kind = _KIND_OF_SETTING[next(iter(settings))]
            found.append(Condition(f"{name}: {description}", kind, {name: settings}))
    if declaration.aliases:
        *names, last = declaration.aliases
        found.append(Condition(f"{', '.join(names)} and {last} are one tensor", ALIASED, aliases=declaration.aliases))
    again = Condition("the usual arguments, with other numbers, after all other calls", REPEATED, draw=1)
    return [each for each in [*found, again] if is_selected(each.kind)] or found[:1]


def _check(
    declaration: Declaration,
    condition: Condition,
    answer: Any,
    group: Any,
    network: Any,
    given: list[weakref.ref],
) -> Call:
    """Call the answer once and check what this rank can; return what there is to compare later.

    given: references to the tensors of all calls, to which those of this one are added.
    """

    def arguments(rank: int) -> dict[str, Any]:
        return _make_arguments(declaration, condition, rank, group.size)

    case, before = condition.description, len(network.records)
    passed, original = arguments(group.rank), arguments(group.rank)
    given += [weakref.ref(each) for each in tree_leaves(passed) if isinstance(each, Tensor)]
    every_rank = [arguments(rank) for rank in range(group.size)]
    with torch.no_grad():
        expected = declaration.reference(every_rank, group.rank)
    if isinstance(expected, type) and issubclass(expected, Exception):
        _expect_raises(expected, lambda: declaration.call(answer, group, **passed), case)
        _expect_unchanged(replace(declaration, changes=()), passed, original, case)
        return Call(case)
    is_recording = not any(_requires_gradients(each) for each in passed.values())
    with torch.set_grad_enabled(is_recording):
        result = declaration.call(answer, group, **passed)
    if (
        is_recording
        and not declaration.has_parameters
        and any(_requires_gradients(each) for each in tree_leaves(result))
    ):
        what = "the result requires gradients, and no argument does: it keeps the graph behind it in memory"
        raise Wrong("wrong", what, "a detached tensor", "a tensor that requires gradients", case=case)
    records = network.records[before:]
    sent = {record.dtype for record in records}
    _expect_unchanged(declaration, passed, original, case)
    if not declaration.shares:
        _expect_own_memory([passed[name] for name in passed if name not in declaration.changes], result, case)
    tensors = [each for each in tree_leaves(original) if isinstance(each, Tensor)]
    if declaration.wire and tensors and (others := sent - {tensors[0].dtype, *declaration.more_dtypes}):
        what = "the dtype of the tensors that your code sends to other ranks"
        raise Wrong("wrong", what, _format_dtype(tensors[0].dtype), _format_dtype(others.pop()), case=case)
    _expect_equal(result, expected, declaration.roundings, case)
    most = None if declaration.max_bytes is None else declaration.max_bytes(every_rank)
    sent_bytes = sum(record.wire_bytes for record in records)
    return Call(case, result, tree_map_only(Tensor, Tensor.clone, result), sent_bytes, most)


def _make_arguments(declaration: Declaration, condition: Condition, rank: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of one rank under a condition, by name."""
    made = {}
    for name, strategy in declaration.inputs.items():
        settings = condition.settings.get(name, {})
        if like := getattr(strategy, "like", ""):
            settings = _without_layout(condition.settings.get(like, {})) | settings
        made[name] = strategy.make(rank, ranks, settings, condition.draw)
    for name in condition.aliases[1:]:
        made[name] = made[condition.aliases[0]]
    return made


def _check_growth(declaration: Declaration, growth: Growth, answer: Any, group: Any) -> None:
    """Fail if the memory of a call grows more, from the smaller arguments to the larger ones, than is declared.

    The thread of a communication backend keeps tensors for a random time. So a call that takes too much is repeated,
    and the least counts: of each size, the least peak and the least memory that was kept.
    """
    whats = ("the peak of memory during the call grows", "the memory that is kept after the call grows")
    least = [(math.inf, math.inf)] * len(growth.sizes)
    for _ in range(_MEASUREMENTS):
        allowed, sizes = [], []
        for number, settings in enumerate(growth.sizes):
            passed = _make_arguments(declaration, Condition("", GROWN, settings), group.rank, group.size)
            for name in growth.requires_grad:
                passed[name].requires_grad_()
            seen = _measure_memory(functools.partial(growth.call or declaration.call, answer, group, **passed))
            least[number] = tuple(map(min, seen, least[number]))
            limits = (growth.peak_bytes, growth.kept_bytes)
            allowed.append([limit(passed, group.size) if limit else math.inf for limit in limits])
            sizes.append(_describe_size(passed, settings))
        most = [larger - smaller if larger < math.inf else larger for smaller, larger in zip(*allowed, strict=True)]
        # The ranks compare the largest growth of all, so that all of them fail and none waits for the others.
        grown = all_gather_object([larger - smaller for smaller, larger in zip(*least, strict=True)], group)
        found = [
            each for each in zip(whats, map(max, zip(*grown, strict=True)), most, strict=True) if each[1] > each[2]
        ]
        if not found:
            return
    what, got, limit = found[0]
    case = f"arguments of each rank: {sizes[0]}, and then {sizes[1]}, on {format_count(group.size, 'rank')}"
    raise Wrong("wrong", f"{what}, in bytes", f"by at most {limit:.0f}", f"by {got}", case=case)


def _measure_memory(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the peak of memory, in bytes, in a call and in backward from its results; and what the call keeps."""
    gc.collect()  # what an earlier call has left in cycles would be subtracted if it were freed during this one
    wait_until_dropped(_DROPPED_S)
    with PeakMemory() as forward:
        result = call()
        wait_until_dropped(_DROPPED_S)
    outputs = [each for each in tree_leaves(result) if _requires_gradients(each) and each.grad_fn is not None]
    if not outputs:
        return forward.peak_bytes, forward.kept_bytes
    gradients = [torch.ones_like(each) for each in outputs]
    with PeakMemory() as backward:
        torch.autograd.backward(outputs, gradients)
    return max(forward.peak_bytes, forward.kept_bytes + backward.peak_bytes), forward.kept_bytes


def _describe_size(arguments: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe those arguments that `settings` makes larger: the bytes of tensors, or the values if none is one."""
    larger = {name: arguments[name] for name in settings}
    num_bytes = sum(each.nbytes for each in tree_leaves(larger) if isinstance(each, Tensor))
    return f"{num_bytes} bytes" if num_bytes else ", ".join(f"{name}={value}" for name, value in larger.items())


def _compare_ranks(declaration: Declaration, calls: Sequence[Call], group: Any) -> None:
    """Fail if the ranks have together sent too many bytes in a call, or if results that must be replicas differ.

    The ranks exchange what they know of all calls at once: one exchange per call would take longer than the calls.
    """
    if declaration.max_bytes is None and not declaration.replicas:
        return
    mine = [(call.sent_bytes, [_digest(each) for each in tree_leaves(call.copy)]) for call in calls]
    for call, by_rank in zip(calls, zip(*all_gather_object(mine, group), strict=True), strict=True):
        sent, digests = zip(*by_rank, strict=True)
        if call.max_bytes is not None and sum(sent) > call.max_bytes:
            what = "bytes that all ranks together send"
            raise Wrong("wrong", what, f"at most {call.max_bytes}", str(sum(sent)), case=call.case)
        if declaration.replicas and any(each != digests[0] for each in digests):
            every = all_gather_object(_as_plain(call.copy), group)
            rank = next(rank for rank, each in enumerate(digests) if each != digests[0])
            what = f"ranks {group.ranks[0]} and {group.ranks[rank]} end with different bits: the replicas drift apart"
            raise Wrong("wrong", what, show(every[0]), show(every[rank]), case=call.case)


def _without_layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a contiguous tensor of finite numbers that has the same shape and dtype."""
    layouts = {"transposed": "matrix", "slice": "contiguous"}
    kept = {key: value for key, value in settings.items() if key not in ("special", "zeros")}
    return kept | ({"layout": layouts.get(kept["layout"], kept["layout"])} if "layout" in kept else {})


def exact(tensor: Tensor) -> Tensor:
    """Return a copy in float64, or in int64 if the tensor has integers: for references, whose sums must not round."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the elementwise reduction of tensors of one shape and dtype, rounded once to the dtype."""
    stacked = torch.stack([exact(tensor) for tensor in tensors])
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}[op]
    return reduce(stacked, 0).to(tensors[0].dtype)


def declare_all_reduce(
    call: Callable[..., Tensor], max_bytes: Callable[[list[dict[str, Any]]], int]
) -> tuple[Declaration, Declaration]:
    """Declare an all-reduce in place, with the reduction ops whose results are exact and with those that round.

    call: (answer, group, tensor, op) -> the reduced tensor. max_bytes: as in `Declaration`.
    """
    exact_ops = Declaration(
        inputs={"tensor": Tensors(layouts=("slice", "scalar")), "op": Choices(("sum", "max", "min"))},
        call=call,
        reference=lambda ranks, rank: reduced([each["tensor"] for each in ranks], ranks[0]["op"]),
        changes=("tensor",),
        replicas=True,
        max_bytes=max_bytes,
    )
    one_size = Tensors(dtypes=FLOATS, layouts=(), sizes=False, non_finite=False)
    # Eight roundings: a product of at most seven numbers.
    inputs = {"tensor": one_size, "op": Choices(("product",))}
    return exact_ops, replace(exact_ops, inputs=inputs, roundings=8)


def _expect_raises(error: type[Exception], call: Callable[[], Any], case: str) -> None:
    """Fail unless the call raises `error`. case: describes the call in the message."""
    try:
        got = call()
    except error:
        return
    raise Wrong("wrong", f"these arguments must raise {error.__name__}", error.__name__, show(_as_plain(got)), case)


def _expect_unchanged(declaration: Declaration, passed: Mapping, original: Mapping, case: str) -> None:
    """Fail if an argument has changed that must not, or the memory around one that may."""
    for name, value in passed.items():
        if name not in declaration.changes and not _equal_bits(value, original[name]):
            what = f"your code changes its argument {name}"
            raise Wrong("wrong", what, show(_as_plain(original[name])), show(_as_plain(value)), case=case)
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.storage_offset() == _MARGIN:
                around = tensor.as_strided((tensor.numel() + 2 * _MARGIN,), (1,), 0)
                around = torch.cat([around[:_MARGIN], around[-_MARGIN:]])
                if not bool((around == _SENTINEL).all()):
                    what = (
                        f"your code writes outside {name}, which is a slice of a longer tensor: the elements around it"
                    )
                    raise Wrong("wrong", what, show([_SENTINEL] * 2 * _MARGIN), show(around), case=case)


def _expect_own_memory(arguments: Sequence[Any], result: Any, case: str) -> None:
    """Fail if the result shares memory with an argument: changing one would change the other."""
    inputs = {each.untyped_storage().data_ptr() for each in tree_leaves(arguments) if _has_elements(each)}
    if any(each.untyped_storage().data_ptr() in inputs for each in tree_leaves(result) if _has_elements(each)):
        what = "the result shares memory with an argument: changing one changes the other"
        raise Wrong("wrong", what, "a tensor with memory of its own", "a view of the argument", case=case)


def _expect_equal(got: Any, expected: Any, roundings: int, case: str) -> None:
    """Fail unless the result has the expected structure, types, dtypes, shapes and numbers."""
    found, structure = tree_flatten(got)
    wanted, expected_structure = tree_flatten(expected)
    if structure != expected_structure:
        raise Wrong(
            "type", "the structure of the result", _describe_structure(expected), _describe_structure(got), case=case
        )
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, Tensor):
            if type(one) is not type(other) or one != other:
                raise Wrong("wrong", "the result", show(other), show(_as_plain(one)), case=case)
            continue
        if not isinstance(one, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            raise Wrong(
                "type", "the result's dtype and shape", _describe_structure(other), _describe_structure(one), case=case
            )
        check_tensor_class(one)
        _expect_close(one.detach(), other.detach(), roundings, case)


def _expect_close(got: Tensor, expected: Tensor, roundings: int, case: str) -> None:
    """Fail unless the tensors are equal, NaN to NaN, but for rounding; integers must be equal exactly."""
    exact = not expected.dtype.is_floating_point
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    # Each operation rounds by at most half an epsilon of its result, which is no larger than the largest number here.
    tolerance = 0.0 if exact else roundings * torch.finfo(expected.dtype).eps * largest
    close = torch.isclose(got.double(), expected.double(), rtol=0, atol=tolerance, equal_nan=True)
    if exact:
        close = got == expected
    if not bool(close.all()):
        place = tuple(torch.nonzero(~close)[0].tolist())
        at = f", at [{', '.join(map(str, place))}]" if place else ""
        raise Wrong("wrong", f"the result{at}", show(expected[place]), show(got[place]), case=case)


def _equal_bits(one: Any, other: Any) -> bool:
    """Return whether two nestings of tensors and plain values are equal, NaN equal to NaN."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)) and bool((a.isnan() == b.isnan()).all())
        if isinstance(a, Tensor)
        else a is b or a == b or not isinstance(a, int | float | str)
        for a, b in pairs
    )


def _digest(value: Any) -> str:
    """Return a digest of the bits of a tensor, or of the text of another value."""
    if not isinstance(value, Tensor):
        return repr(value)
    return hashlib.sha256(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()


def _requires_gradients(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _as_plain(value: Any) -> Any:
    """Return the value with lists in place of its tensors."""
    return tree_map_only(Tensor, Tensor.tolist, value)


def _describe_structure(value: Any) -> str:
    """Describe a result without its numbers: dtypes and shapes of tensors."""
    if isinstance(value, Tensor):
        return f"a {_format_dtype(value.dtype)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of ({', '.join(map(_describe_structure, value))})"
    return type(value).__name__ if value is not None else "None"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
