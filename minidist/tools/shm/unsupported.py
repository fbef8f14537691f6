"""Methods of torch's process groups that the backend shm lacks, and the alternative to each."""

from minidist.tools.shm.barrier import ShmError

ALTERNATIVES = {
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


def reject_unsupported_methods(group_class: type) -> type:
    """Decorate a process group class: methods that the backend lacks raise ShmError, which names an alternative."""
    for name, instead in ALTERNATIVES.items():
        setattr(group_class, name, _make_rejecting_method(name, instead))
    return group_class


def _make_rejecting_method(name: str, instead: str):
    """Return a method called `name` that raises ShmError. instead: the advice in its message."""

    def refuse(self, *_, **__):
        raise ShmError(f"the backend shm has no {name}: {instead}")

    refuse.__name__ = name
    return refuse
