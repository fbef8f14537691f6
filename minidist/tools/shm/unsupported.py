"""What torch's process groups can do and this one cannot, with what to do instead."""

from minidist.tools.shm.rendezvous import ShmError

INSTEAD = {
    "recv_anysource": "name the rank that sends, recv(..., src=...)",
    "split_group": "make the parts with new_group",
    "merge_remote_group": "make the whole with new_group",
    "_get_backend": "the group itself is the backend, for every device",
    "_has_hooks": "wait for the works that the operations return",
    "_register_on_completion_hook": "wait for the works that the operations return",
    "_wait_for_pending_works": "wait for the works that the operations return",
    "_enable_collectives_timing": "time the waits",
    "use_pg_for_symm_mem_rendezvous": "symmetric memory is for GPUs",
}


def refusing(group: type) -> type:
    """The class, with these methods. Left to the base class they would fail in words about something else."""
    for name, instead in INSTEAD.items():
        setattr(group, name, _refusal(name, instead))
    return group


def _refusal(name: str, instead: str):
    def refuse(self, *_, **__):
        raise ShmError(f"the backend shm has no {name}: {instead}")

    refuse.__name__ = name
    return refuse
