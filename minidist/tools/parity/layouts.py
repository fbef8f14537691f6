"""The layouts of N ranks: every factorisation of N over the mesh axes, with every schedule and attention variant."""

from dataclasses import dataclass
from itertools import product

from minidist.mesh import AXES, Mesh
from minidist.validation import SCHEDULES


@dataclass(frozen=True)
class Layout:
    """A mesh, and the variants of its axes: pipeline schedule, sequence parallelism, context-parallel attention.

    pp, dp, cp, tp: the size of each axis. schedule: the pipeline schedule; None if pp is 1. sequence: whether tensor
    parallelism has sequence parallelism; None if tp is 1. context: "ring" or "ulysses" attention; None if cp is 1.
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
        """The mesh of the layout."""
        return Mesh(**{axis: getattr(self, axis) for axis in AXES})

    @property
    def chunks_per_stage(self) -> int:
        """The number of model chunks per pipeline stage."""
        return 2 if self.schedule in ("interleaved", "zb-v") else 1

    def __str__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1] or ["dp=1"]
        options = [self.schedule, "sequence" if self.sequence else None, self.context]
        return " ".join(axes + [word for word in options if word])


def list_layouts(world: int) -> list[Layout]:
    """Return every factorisation of `world` ranks over the mesh axes, each with every variant of its axes.

    Pure data parallelism is the first.
    """
    layouts = []
    for pp, cp, tp in product(range(1, world + 1), repeat=3):
        if world % (pp * cp * tp):
            continue
        options = product(SCHEDULES if pp > 1 else [None], (False, True) if tp > 1 else [None], _attention_variants(cp))
        layouts += [Layout(pp, world // (pp * cp * tp), cp, tp, *values) for values in options]
    return layouts


def _attention_variants(cp: int) -> tuple[str | None, ...]:
    """Return the variants of context-parallel attention for `cp` ranks; (None,) for one rank."""
    return ("ring", "ulysses") if cp > 1 else (None,)
