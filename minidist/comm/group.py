"""Process groups, made from a mesh by declared use.

A *use* says along which axes ranks talk and what for. All groups are made at once, by all ranks in one order, so no
rank can wait for a group that another has not begun to make. Two uses over the same ranks get groups of their own:
what is queued for one purpose never delays, and never pairs with, what is sent for another.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
    """The ranks this rank talks to for one use.

    use: the purpose; ranks: ascending global ranks; rank: place of this rank among them.
    process_group: torch's group, None when there is one rank (nothing to say to anybody).
    algorithm: what `all_reduce` of more than one rank runs, called with its arguments; None: the backend's own.
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
        """Whether torch's own gloo carries what this group sends."""
        return self.process_group is not None and dist.get_backend(self.process_group) == "gloo"

    @cached_property
    def key(self) -> str:
        """The name by which a custom op, whose arguments are tensors and strings, finds this group."""
        return f"{self.use}[{','.join(map(str, self.ranks))}]"

    @cached_property
    def collective(self) -> Channel:
        return Channel("collective", self.use, self.ranks)

    def transfer(self, kind: str, peer: int, tag: int) -> Channel:
        """The channel of a send to, or a recv from, group rank `peer`."""
        return Channel(kind, self.use, self.ranks, self.ranks[peer], tag)

    def __str__(self) -> str:
        return f"'{self.use}' (ranks {', '.join(map(str, self.ranks))})"


@dataclass(eq=False)
class Groups(Mapping[str, Group]):
    """This rank's group for each use: `groups["grads"]`. uses: those that `bind` was given."""

    mesh: Mesh
    world: World
    meter: Meter
    uses: tuple[GroupSpec, ...] = ()
    _groups: dict[str, Group] = field(default_factory=dict)

    def destroy(self) -> None:
        """Give back what the groups hold: sockets, threads, shared memory. All ranks call it; no group works after."""
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


# A torch.library op takes tensors and strings, so it cannot be handed its group. This is the one table of the package
# that outlives a call; it holds no group alive.
_LIVE: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()


def find(key: str) -> Group:
    """The live group of this process with that key."""
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
    """Make the groups of every use, and one called "control" over all ranks. All ranks call it, with equal arguments.

    backend: torch's name of the backend; the default group's when None.
    timeout_s: after this long in one operation the backend gives up.
    Raises ValueError when the mesh does not have as many ranks as the world, or two uses share a name.
    """
    if mesh.world_size != world.size:
        raise ValueError(f"{mesh} has {mesh.world_size} ranks, the world has {world.size}")
    uses = [CONTROL, *uses]
    if len({use.name for use in uses}) != len(uses):
        raise ValueError(f"two uses share a name: {', '.join(use.name for use in uses)}")
    groups = Groups(mesh, world, meter if meter is not None else Meter(), tuple(uses[1:]))
    _announce(world, mesh, uses)
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
        group = Group(use.name, mine, mine.index(world.rank), made, world, groups.meter)
        groups._groups[use.name] = _LIVE[group.key] = group
    world.status.resume()
    return groups


def _announce(world: World, mesh: Mesh, uses: list[GroupSpec]) -> None:
    """Say on the board that this rank waits for all others to bind the same: making groups blocks like an operation."""
    what = ", ".join(f"{use.name} over {'/'.join(use.axes)}" for use in uses)
    channel, told = Channel("collective", "bind", tuple(range(world.size))), f"on {mesh}: {what}"
    seq = world.status.launch(channel, "bind", (), told)
    if world.size > 1:
        world.status.wait(channel, seq, "bind", (), told)
