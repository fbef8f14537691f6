"""Process groups, made from a mesh and group specs.

A group spec declares a name, which states a purpose, and the mesh axes along which ranks communicate for it. `bind`
makes all groups at once, in the same order on every rank, so no rank can wait for a group that another rank has not
begun to make. Two specs over the same ranks get separate groups, so that their operations neither delay nor match each
other.
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
from minidist.errors import CommError, format_ranks
from minidist.mesh import Mesh

DEFAULT_TIMEOUT_S = 600.0


@dataclass(eq=False)
class Group:
    """One process group of this rank.

    name: the name of its `GroupSpec`. ranks: ascending global ranks of the group. rank: this rank's index in `ranks`.
    process_group: torch's process group; None for a group of one rank, which does not communicate.
    world: this rank's environment. meter: receives a record of each operation.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    world: World
    meter: Meter

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @cached_property
    def uses_gloo(self) -> bool:
        """Whether the group's backend is torch's gloo."""
        return self.process_group is not None and dist.get_backend(self.process_group) == "gloo"

    @cached_property
    def key(self) -> str:
        """The group's name and ranks as a string, which custom ops take as argument and pass to `find_group`."""
        return f"{self.name}[{','.join(map(str, self.ranks))}]"

    @cached_property
    def collective_channel(self) -> Channel:
        """The `Channel` that numbers this group's collectives, so that the progress of ranks can be compared."""
        return Channel("collective", self.name, self.ranks)

    def transfer_channel(self, kind: str, peer: int, tag: int) -> Channel:
        """Return the `Channel` of transfers with group rank `peer` and `tag`. kind: "send" (to the peer) or "recv"."""
        return Channel(kind, self.name, self.ranks, self.ranks[peer], tag)

    def __str__(self) -> str:
        return f"'{self.name}' (ranks {', '.join(map(str, self.ranks))})"


@dataclass(eq=False)
class Groups(Mapping[str, Group]):
    """This rank's groups by name: `groups["grads"]`.

    mesh, world, meter: shared by all these groups. specs: the specs that `bind` received.
    """

    mesh: Mesh
    world: World
    meter: Meter
    specs: tuple[GroupSpec, ...]
    _groups: dict[str, Group]

    def destroy(self) -> None:
        """Collective: destroy torch's process groups, which frees their sockets, threads and shared memory.

        No group can communicate afterwards.
        """
        for group in self._groups.values():
            if group.process_group is not None:
                dist.destroy_process_group(group.process_group)
                group.process_group = None

    def __getitem__(self, name: str) -> Group:
        if name not in self._groups:
            raise KeyError(f"no group {name!r}: this rank has the groups {', '.join(self._groups)}")
        return self._groups[name]

    def __iter__(self):
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


# A torch.library op takes tensors and strings, so it cannot take its group as an argument. This is the one table of the
# package that outlives a call; it keeps no group alive.
_GROUPS_BY_KEY: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()


def find_group(key: str) -> Group:
    """Return the group of this process whose `Group.key` is `key`. Raises KeyError if there is no such group."""
    return _GROUPS_BY_KEY[key]


def bind(
    world: World,
    mesh: Mesh,
    specs: Iterable[GroupSpec] = (),
    *,
    meter: Meter | None = None,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check: Callable[[Group], None] | None = None,
    connect_timeout_s: float | None = None,
) -> Groups:
    """Collective: create the groups of every spec and one named "control" over all ranks; return this rank's groups.

    All ranks must pass equal arguments. mesh: has as many ranks as `world`. meter: records the operations of all
    groups; a new meter if None. backend: torch's name of the backend; None: the backend of the default group.
    timeout_s: seconds until the backend aborts an operation. check: called with the control group before any other
    group is created; should raise on all ranks if their arguments differ, as ranks that create different groups wait
    for each other. connect_timeout_s: seconds until the backend aborts the creation of a group; None: `timeout_s`.
    Raises ValueError if the mesh and the world differ in size, or two specs share a name; CommError if a group cannot
    be created because a rank has died.
    """
    if mesh.world_size != world.size:
        raise ValueError(f"{mesh} has {mesh.world_size} ranks, the world has {world.size}")
    specs = [CONTROL, *specs]
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError(f"two group specs share a name: {', '.join(spec.name for spec in specs)}")
    meter = Meter() if meter is None else meter
    groups: dict[str, Group] = {}
    _report_bind(world, mesh, specs, shows_arguments=check is None)
    for spec in specs:
        own_ranks = None
        own_process_group = None
        for ranks in spec.rank_groups(mesh):
            process_group = None
            if len(ranks) > 1:
                process_group = _new_process_group(spec.name, ranks, backend, timeout_s, connect_timeout_s)
            if world.rank in ranks:
                own_ranks = ranks
                own_process_group = process_group
        if own_ranks is None:
            continue
        group = Group(spec.name, own_ranks, own_ranks.index(world.rank), own_process_group, world, meter)
        groups[spec.name] = _GROUPS_BY_KEY[group.key] = group
        if spec is CONTROL and check is not None:
            check(group)
    world.status.on_resume()
    return Groups(mesh, world, meter, tuple(specs[1:]), groups)


def _new_process_group(
    name: str, ranks: tuple[int, ...], backend: str | None, timeout_s: float, connect_timeout_s: float | None
) -> dist.ProcessGroup:
    """Create torch's process group of these ranks; all ranks of the world call it. Raises CommError if that fails.

    The timeouts are those of `bind`: `connect_timeout_s` holds for the creation, `timeout_s` for operations afterwards.
    """
    timeout = timedelta(seconds=connect_timeout_s or timeout_s)
    try:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
    except (RuntimeError, IndexError) as error:
        raise CommError(f"group '{name}' of {format_ranks(ranks)} could not be created: {error}") from error
    if connect_timeout_s is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        group.set_timeout(timedelta(seconds=timeout_s))
    return group


def _report_bind(world: World, mesh: Mesh, specs: list[GroupSpec], shows_arguments: bool) -> None:
    """Report to rank status that this rank waits for all others in `bind`: making groups blocks like an operation.

    shows_arguments: whether the report contains the mesh and the group specs, so that deadlock detection shows on which
    ranks they differ. Not needed if `bind` has a `check`, which compares them.
    """
    declared = ", ".join(f"{spec.name} over {'/'.join(spec.axes)}" for spec in specs)
    channel = Channel("collective", "bind", tuple(range(world.size)))
    arguments = f"on {mesh}: {declared}" if shows_arguments else ""
    seq = world.status.on_launch(channel, "bind", (), arguments)
    if world.size > 1:
        world.status.on_wait(channel, seq, "bind", (), arguments)
