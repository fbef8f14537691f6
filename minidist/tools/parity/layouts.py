"""The layouts of N ranks: every factorisation of N over the mesh axes, with every schedule and attention variant."""

from dataclasses import dataclass
from itertools import product

from minidist.mesh import AXES, Mesh
from minidist.parallel.pipeline.schedules import KINDS


@dataclass(frozen=True)
class Layout:
    """A mesh with the pipeline schedule, sequence parallelism over tp, and context-parallel attention over cp.

    The option of an axis of size 1 is None.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    schedule: str | None = None
    sequence: bool | None = None
    context: str | None = None

    @property
    def mesh(self) -> Mesh:
        return Mesh(**{axis: getattr(self, axis) for axis in AXES})

    @property
    def chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return 2 if self.schedule in ("interleaved", "zb-v") else 1

    def __str__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1] or ["dp=1"]
        how = [self.schedule, "sequence" if self.sequence else None, self.context]
        return " ".join(axes + [word for word in how if word])


def list_layouts(world: int) -> list[Layout]:
    """Every factorisation of `world` over the axes with every option of its axes; pure data parallelism first."""
    found = []
    for pp, cp, tp in product(range(1, world + 1), repeat=3):
        if world % (pp * cp * tp):
            continue
        ways = product(KINDS if pp > 1 else [None], (False, True) if tp > 1 else [None], _contexts(cp))
        found += [Layout(pp, world // (pp * cp * tp), cp, tp, *how) for how in ways]
    return found


def _contexts(cp: int) -> tuple[str | None, ...]:
    return ("ring", "ulysses") if cp > 1 else (None,)
