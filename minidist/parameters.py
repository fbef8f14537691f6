"""Facts about parameters, in one table: `specs[global_name]`.

The global name and shape of a parameter are those of the unsplit model in every layout. What this rank holds of it is
a list of boxes (rectangles of the global tensor): one box for a whole or a tensor-parallel parameter, several for the
flat ranges of ZeRO. Reduction, norm, clipping, optimizer, checkpoint and parity read this table, so that they agree.

The table is keyed by name and stored beside the model, because an attribute on a Parameter does not survive deepcopy,
`to_empty`, `load_state_dict(assign=True)` or a wrapper.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

# torch.compile and activation checkpointing put these into the names of what they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Box:
    """The rectangle `start <= index < stop` of a tensor, one pair per dimension (none for a scalar)."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self):
        if len(self.start) != len(self.stop) or any(
            not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"no box from {self.start} to {self.stop}: every start must be between 0 and its stop")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the global tensor: `tensor[box.slices]`."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The part in both boxes, or None when they share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this box in a tensor that holds exactly `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes, in memory order, that cover elements `start` to `stop` of a row-major tensor of this shape.

    At most `2 d - 1` boxes for `d` dimensions: a partial row at each end on every level, whole rows between them.
    Raises ValueError when the range is not inside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"elements {start} to {stop} are not inside a tensor of shape {shape} ({total} elements)")
    return list(_flat_boxes(tuple(shape), start, stop))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start == stop:
        return
    if len(shape) <= 1:
        yield Box((start,) if shape else (), (stop,) if shape else ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first <= i < last
    if first > last:  # everything inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else ()
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last,) + shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in _flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))


@dataclass(frozen=True)
class ParamSpec:
    """What one rank knows of one parameter.

    name: global name, as in the unsplit model. For tied parameters the first of their names.
    shape: global shape.
    boxes: what this rank holds of it, in the order of its memory.
    replicas: ascending global ranks that hold the same boxes, this one included. The norm counts, and the checkpoint
        writes, one of them (`owner`).
    ties: other names of the same tensor.
    expert: whether it belongs to an expert, whose tokens come from all ranks of the expert-parallel group.
    contributors: those of the replicas, this one included, whose gradients are parts of one sum, because each saw other
        tokens or other layers. Replicas that saw the same have the same gradient, and adding it would double it. All
        replicas when not given.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    ties: tuple[str, ...] = ()
    expert: bool = False
    contributors: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "contributors", self.contributors or self.replicas)
        if not set(self.contributors) <= set(self.replicas):
            raise ValueError(f"{self.name}: {self.contributors} are to be summed, and {self.replicas} hold it")

    @property
    def owner(self) -> int:
        """The one replica that counts in a norm and writes to a checkpoint; the work is spread over the replicas."""
        return self.replicas[zlib.crc32(self.name.encode()) % len(self.replicas)]

    @property
    def numel(self) -> int:
        """Elements this rank holds."""
        return sum(box.numel for box in self.boxes)


ParamSpecs = Mapping[str, ParamSpec]


def global_name(module_name: str) -> str:
    """The name a parameter has in the plain model, whatever wrappers have been put around its modules."""
    for wrapper in _WRAPPERS:
        module_name = module_name.replace(wrapper, "")
    return module_name


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Global name to parameter, each tensor once (a tied one under its first name), in the order of the model."""
    return {global_name(name): parameter for name, parameter in model.named_parameters()}


def replicated_specs(model: nn.Module, ranks: tuple[int, ...]) -> dict[str, ParamSpec]:
    """The table of a model that every rank of `ranks` holds whole (data parallelism)."""
    ties, specs = tied_names(model), {}
    for name, parameter in named_parameters(model).items():
        shape = tuple(parameter.shape)
        specs[name] = ParamSpec(name, shape, (Box.whole(shape),), tuple(sorted(ranks)), ties[name])
    return specs


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Global name of each parameter to the other names of the same tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(global_name(name))
    return {first: tuple(others) for first, *others in names.values()}


def check_specs_cover(model: nn.Module, specs: ParamSpecs) -> None:
    """Raise KeyError unless every parameter of the model has a spec of its local size."""
    for name, parameter in named_parameters(model).items():
        if name not in specs:
            raise KeyError(f"parameter {name} has no ParamSpec; {len(specs)} are known, among them {sorted(specs)[:3]}")
        if parameter.numel() != specs[name].numel:
            raise KeyError(
                f"parameter {name} holds {parameter.numel()} elements here, its ParamSpec says {specs[name].numel}"
            )
