"""Group specs: along which mesh axes ranks communicate, and for what purpose. Needs no torch."""

from dataclasses import dataclass

from minidist.mesh import AXES, Mesh


@dataclass(frozen=True)
class GroupSpec:
    """Declares process groups for one purpose: ranks whose mesh coordinates differ only on `axes` form a group.

    name: the purpose, for example "grads"; `Groups` finds this rank's group by it. axes: names of mesh axes.
    axis_partitions: pairs of an axis and disjoint sets of coordinates on it, which split these groups further: only
    ranks whose coordinates lie in the same set form a group; a rank whose coordinate lies in no set has no group.
    """

    name: str
    axes: tuple[str, ...]
    axis_partitions: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()

    def rank_groups(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """Return the global ranks of every group on `mesh`, in an order that is the same on all ranks."""
        groups = mesh.rank_groups(self.axes)
        for axis, sets in self.axis_partitions:
            groups = [
                tuple(rank for rank in group if mesh.coords(rank)[axis] in some) for group in groups for some in sets
            ]
        return groups


CONTROL = GroupSpec("control", AXES)
