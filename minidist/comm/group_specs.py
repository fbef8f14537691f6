"""Group specs: along which mesh axes ranks communicate, and for what purpose. Needs no torch."""

from dataclasses import dataclass

from minidist.mesh import AXES, Mesh


@dataclass(frozen=True)
class GroupSpec:
    """Declares one family of process groups: ranks that differ only on `axes` form a group for the purpose `name`.

    subgroups: (axis, sets of coordinates on it) pairs that split the groups further: only ranks whose coordinate lies
    in the same set are in one group. A rank whose coordinate lies in no set has no group for this purpose.
    """

    name: str
    axes: tuple[str, ...]
    subgroups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()

    def rank_groups(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """The ranks of every group, in an order that is the same on all ranks."""
        groups = mesh.rank_groups(self.axes)
        for axis, sets in self.subgroups:
            groups = [
                tuple(rank for rank in group if mesh.coords(rank)[axis] in some) for group in groups for some in sets
            ]
        return groups


CONTROL = GroupSpec("control", AXES)
