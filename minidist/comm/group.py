"""Process groups, made from a mesh and group specs.

A group spec declares a purpose and the mesh axes along which ranks communicate for it. `bind` makes all groups at once,
in the same order on every rank, so no rank can wait for a group that another rank has not begun to make. Two specs over
the same ranks get separate groups: operations for one purpose never delay operations for another, and never match them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from minidist.comm.group_specs import CONTROL, GroupSpec
from minidist.comm.meter import Meter
from minidist.comm.status import Channel
from minidist.comm.world import World
from minidist.mesh import Mesh

DEFAULT_TIMEOUT_S = 600.0


@dataclass(eq=False)
class Group:
    """One process group of this rank.

    use: the purpose, which is the name of its spec; ranks: ascending global ranks; rank: index of this rank in them.
    process_group: torch's group; None for a group of one rank, which communicates with nobody.
    algorithm: the function that `all_reduce` calls for more than one rank; None: the backend's own.
    """

    use: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    world: World
    meter: Meter
    algorithm: Callable | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def over_gloo(self) -> bool:
        """Whether torch's own gloo carries the operations of this group."""
        return self.process_group is not None and dist.get_backend(self.process_group) == "gloo"

    @cached_property
    def key(self) -> str:
        """The name by which a custom op, whose arguments are tensors and strings, finds this group."""
        return f"{self.use}[{','.join(map(str, self.ranks))}]"

    @cached_property
    def collective(self) -> Channel:
        """The channel of this group's collectives."""
        return Channel("collective", self.use, self.ranks)

    def transfer(self, kind: str, peer: int, tag: int) -> Channel:
        """Return the channel of a send to, or a recv from, group rank `peer`. kind: "send" or "recv"."""
        return Channel(kind, self.use, self.ranks, self.ranks[peer], tag)

    def __str__(self) -> str:
        return f"'{self.use}' (ranks {', '.join(map(str, self.ranks))})"


@dataclass(eq=False)
class Groups(Mapping[str, Group]):
    """This rank's groups by purpose: `groups["grads"]`. uses: the specs that `bind` was given."""

    mesh: Mesh
    world: World
    meter: Meter
    uses: tuple[GroupSpec, ...]
    _groups: dict[str, Group]

    def destroy(self) -> None:
        """Release sockets, threads and shared memory of all groups. All ranks call it; no group works afterwards."""
        for group in self._groups.values():
            if group.process_group is not None:
                dist.destroy_process_group(group.process_group)
                group.process_group = None

    def __getitem__(self, use: str) -> Group:
        if use not in self._groups:
            raise KeyError(f"no group for {use!r}: this rank has groups for {', '.join(self._groups)}")
        return self._groups[use]

    def __iter__(self):
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


# A torch.library op takes tensors and strings, so it cannot take its group as an argument. This is the one table of the
# package that outlives a call; it keeps no group alive.
_LIVE: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()


def find(key: str) -> Group:
    """Return the live group of this process with that key."""
    return _LIVE[key]


def bind(
    world: World,
    mesh: Mesh,
    uses: Iterable[GroupSpec] = (),
    *,
    meter: Meter | None = None,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Groups:
    """Make the groups of every spec, and one named "control" over all ranks. All ranks call it with equal arguments.

    meter: counts the operations of all groups; a new one if None. backend: torch's name of the backend; that of the
    default group if None. timeout_s: the backend aborts an operation that takes longer.
    Raises ValueError if the mesh and the world differ in size, or two specs share a name.
    """
    if mesh.world_size != world.size:
        raise ValueError(f"{mesh} has {mesh.world_size} ranks, the world has {world.size}")
    uses = [CONTROL, *uses]
    if len({use.name for use in uses}) != len(uses):
        raise ValueError(f"two uses share a name: {', '.join(use.name for use in uses)}")
    meter = Meter() if meter is None else meter
    groups: dict[str, Group] = {}
    _report_bind(world, mesh, uses)
    for use in uses:
        mine, made = None, None
        for ranks in use.rank_groups(mesh):
            pg = None
            if len(ranks) > 1:
                timeout = timedelta(seconds=timeout_s)
                pg = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=use.name)
            if world.rank in ranks:
                mine, made = ranks, pg
        if mine is None:
            continue
        group = Group(use.name, mine, mine.index(world.rank), made, world, meter)
        groups[use.name] = _LIVE[group.key] = group
    world.status.resume()
    return Groups(mesh, world, meter, tuple(uses[1:]), groups)


def _report_bind(world: World, mesh: Mesh, uses: list[GroupSpec]) -> None:
    """Report to rank status that this rank waits for all others in `bind`: making groups blocks like an operation."""
    what = ", ".join(f"{use.name} over {'/'.join(use.axes)}" for use in uses)
    channel, arguments = Channel("collective", "bind", tuple(range(world.size))), f"on {mesh}: {what}"
    seq = world.status.launch(channel, "bind", (), arguments)
    if world.size > 1:
        world.status.wait(channel, seq, "bind", (), arguments)
