"""The device mesh: ranks on a grid of named axes, outermost first. Needs no process group and no torch.

`tp` changes fastest with the rank, so the ranks of a tensor-parallel group are neighbours (the GPUs of one node), and
`pp` slowest, so pipeline stages are on different nodes: the order of Megatron-LM (Narayanan et al. 2021, section 3.5).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A mesh of `pp * dp * cp * tp` ranks, numbered with tp fastest. Raises ValueError for a size below 1."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis} has size {size!r}; a size is a whole number of at least 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by name, outermost axis first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` by axis. Raises ValueError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on {self}: ranks are 0 to {self.world_size - 1}")
        coords = {}
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self.sizes[axis])
        return {axis: coords[axis] for axis in AXES}

    def rank(self, **coords: int) -> int:
        """Return the rank at these coordinates; an axis that is not given has coordinate 0. The inverse of `coords`.

        Raises ValueError for a coordinate or an axis that the mesh does not have.
        """
        number = 0
        for axis, size in self.sizes.items():
            at = coords.pop(axis, 0)
            if not 0 <= at < size:
                raise ValueError(f"{axis}={at} is outside {self}: {axis} has size {size}")
            number = number * size + at
        if coords:
            raise ValueError(f"no axis {', '.join(coords)}: the axes are {', '.join(AXES)}")
        return number

    def ranks(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the group of `rank` along `axes`: all ranks with its coordinates on the other axes, ascending."""
        axes = self._check_axes(axes)
        home = self.coords(rank)
        spans = [range(size) if axis in axes else (home[axis],) for axis, size in self.sizes.items()]
        return tuple(self.rank(**dict(zip(AXES, at, strict=True))) for at in product(*spans))

    def rank_groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Return all groups of ranks along `axes`, sorted by their first rank; each rank is in one group."""
        axes = self._check_axes(axes)
        groups: list[tuple[int, ...]] = []
        placed: set[int] = set()
        for rank in range(self.world_size):
            if rank not in placed:
                groups.append(self.ranks(axes, rank))
                placed.update(groups[-1])
        return groups

    def __str__(self) -> str:
        return "mesh " + " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())

    @staticmethod
    def _check_axes(axes: Iterable[str]) -> frozenset[str]:
        """Return the axis names as a set. Raises ValueError for a name that is not in `AXES`."""
        axes = frozenset((axes,) if isinstance(axes, str) else axes)
        if unknown := axes - set(AXES):
            raise ValueError(f"no axis {', '.join(sorted(unknown))}: the axes are {', '.join(AXES)}")
        return axes
