"""Uses: along which axes of a mesh ranks talk, and what for. Groups are made from them; this needs no torch."""

from dataclasses import dataclass

from minidist.mesh import AXES, Mesh


@dataclass(frozen=True)
class Use:
    """Ranks that differ on `axes` talk to each other for the purpose `name`.

    among: of an axis, the sets of coordinates that talk to each other, where it is not all of them. A rank whose
    coordinate is in no set has nobody to talk to, and no group for this use.
    """

    name: str
    axes: tuple[str, ...]
    among: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()

    def partition(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """All groups of this use, in one order."""
        groups = mesh.partition(self.axes)
        for axis, sets in self.among:
            groups = [
                tuple(rank for rank in group if mesh.coords(rank)[axis] in some) for group in groups for some in sets
            ]
        return groups


CONTROL = Use("control", AXES)
