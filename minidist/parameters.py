"""Parameter specs: `specs[global_name]` says which shard of a parameter this rank holds, and who holds replicas.

The global name and shape of a parameter are those of the unsplit model in every layout. This rank's shard is a list of
boxes of the global tensor: one for a full or a tensor-parallel parameter, several for a flat range of ZeRO. Reduction,
norm, clipping, optimizer, checkpoint and parity all use these specs.

The specs are a table beside the model, because an attribute of a Parameter does not survive deepcopy, `to_empty`,
`load_state_dict(assign=True)` or a wrapper.
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
    """The elements of a tensor with `start[d] <= index[d] < stop[d]` in every dimension d (none for a scalar)."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self):
        if len(self.start) != len(self.stop) or any(
            not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"no box from {self.start} to {self.stop}: every start must be between 0 and its stop")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box of all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the box in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the global tensor: `tensor[box.slices]`."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None if they have no element in common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def shifted(self, offset: tuple[int, ...]) -> "Box":
        """Return this box, moved by `offset` in each dimension."""
        ends = (self.start, self.stop)
        return Box(*(tuple(a + b for a, b in zip(end, offset, strict=True)) for end in ends))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds exactly the box `outer`, which must contain this one."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes, in memory order, that cover the flat range `start` to `stop` of a row-major tensor.

    At most `2 d - 1` boxes for `d` dimensions: full rows, and a partial row at each end, in every dimension.
    Raises ValueError if the range is not inside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"elements {start} to {stop} are not inside a tensor of shape {shape} ({total} elements)")
    return list(_flat_boxes(tuple(shape), start, stop))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of `flat_boxes`, whose arguments have been checked."""
    if start == stop:
        return
    if len(shape) <= 1:
        yield Box((start,) if shape else (), (stop,) if shape else ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first <= i < last
    if first > last:  # everything inside one row
        yield from _boxes_in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _boxes_in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else ()
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last,) + shape[1:])
    yield from _boxes_in_row(shape, last, 0, stop - last * row)


def _boxes_in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements `start` to `stop` of one row.

    shape: of the full tensor. row: index of the row in dimension 0. start, stop: flat positions within the row.
    """
    for box in _flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))


@dataclass(frozen=True)
class ParamSpec:
    """The global name and shape of a parameter, this rank's shard of it, and the shard's replicas.

    name: global name, as in the unsplit model; of tied parameters the first name.
    shape: global shape.
    boxes: this rank's shard, in memory order.
    replicas: ascending global ranks that hold the same boxes, including this one. The norm counts, and the checkpoint
        saves, only one of them (`owner`).
    contributors: the subset of `replicas`, including this rank, whose local gradients must be summed, because each
        processes other tokens or other layers. The remaining replicas compute the same gradients as one of these, and
        must not be counted twice. All replicas by default.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    contributors: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "contributors", self.contributors or self.replicas)
        if not set(self.contributors) <= set(self.replicas):
            raise ValueError(f"{self.name}: {self.contributors} are to be summed, and {self.replicas} hold it")

    @property
    def owner(self) -> int:
        """Global rank of the replica that the norm counts and the checkpoint saves, chosen by a hash of the name."""
        return self.replicas[zlib.crc32(self.name.encode()) % len(self.replicas)]

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shard."""
        return sum(box.numel for box in self.boxes)


ParamSpecs = Mapping[str, ParamSpec]


def global_name(module_name: str) -> str:
    """Return a parameter's name in the unwrapped model, without the prefixes of module wrappers."""
    for wrapper in _WRAPPERS:
        module_name = module_name.replace(wrapper, "")
    return module_name


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by global name, in order; a tied tensor appears once, under its first name."""
    return {global_name(name): parameter for name, parameter in model.named_parameters()}


def replicated_specs(model: nn.Module, ranks: tuple[int, ...]) -> dict[str, ParamSpec]:
    """Return the specs of a model that is replicated on all of `ranks` (data parallelism)."""
    specs = {}
    for name, parameter in named_parameters(model).items():
        shape = tuple(parameter.shape)
        specs[name] = ParamSpec(name, shape, (Box.whole(shape),), tuple(sorted(ranks)))
    return specs


def check_specs_match_parameters(model: nn.Module, specs: ParamSpecs) -> None:
    """Raise KeyError unless `specs` has a spec of every parameter of the model, with the parameter's local size."""
    for name, parameter in named_parameters(model).items():
        if name not in specs:
            raise KeyError(f"parameter {name} has no ParamSpec; {len(specs)} are known, among them {sorted(specs)[:3]}")
        if parameter.numel() != specs[name].numel:
            raise KeyError(
                f"parameter {name} holds {parameter.numel()} elements here, its ParamSpec says {specs[name].numel}"
            )
