"""A name for one attempt of a run under torchrun, as prefix of its keys in a store that outlives the attempt.

torchrun starts all ranks again after a failure and after nodes joined or left, and its agents keep one store for all of
these attempts. torch's process groups exchange addresses through that store, so a rank could read the address of a
rank of the previous attempt. torchrun's restart count does not identify the attempt: each agent counts its own
failures, and a node that joins changes no count.
"""

import time
import uuid
from typing import TYPE_CHECKING

from minidist.errors import RunError, UserError, format_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

_PERIOD_S, _MAX_PERIOD_S = 0.02, 0.2
_WORLD_SIZE, _CONFLICT = "world_size", "conflict"
OWN_STORE_HINT = (
    "If nodes have joined or left, torchrun may have passed the address of an earlier first node: set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all its agents."
)


def check_same_world_size(store: "Store", rank: int, size: int, timeout_s: float = 600.0) -> None:
    """Raise UserError unless all ranks were started with the same WORLD_SIZE and different RANKs. Collective.

    rank, size: this rank's RANK and WORLD_SIZE. Every other rank waits at most `timeout_s` seconds for rank 0's values
    and compares them with its own; on rank 0 `agree_on_attempt` raises the error. store: a store that rank 0 serves for
    this start of the job alone.
    """
    if rank == 0:
        store.set(_WORLD_SIZE, str(size))
        return
    _wait_for_key(store, _WORLD_SIZE, timeout_s, "Start it, or look at its message.")
    first_size, conflict = store.get(_WORLD_SIZE).decode(), None
    if first_size != str(size):
        conflict = f"rank 0 was started with WORLD_SIZE {first_size}, rank {rank} with WORLD_SIZE {size}"
    elif store.add(f"{_WORLD_SIZE}/{rank}", 1) > 1:
        conflict = f"two of the {size} processes were started with RANK {rank}"
    if conflict:
        conflict += ": give all of them the same WORLD_SIZE, and each a RANK of its own from 0, or start with torchrun."
        store.set(_CONFLICT, conflict)
        raise UserError(conflict)


def agree_on_attempt(store: "Store", rank: int, size: int, timeout_s: float = 600.0, hint: str = OWN_STORE_HINT) -> str:
    """Return a key prefix that is new for this start of the job, the same on all of its `size` ranks. Collective.

    torchrun may start all ranks again with the same store, which still has keys of the earlier attempt. Rank 0 chooses
    the prefix. Every other rank writes a request that is unique to its process and waits for the answer to this
    request, so it cannot read an answer from an earlier attempt. Rank 0 answers all requests, old ones too, until all
    ranks have confirmed.
    Raises RunError, with `hint` as advice, if a rank has not answered or confirmed within `timeout_s` seconds.
    """
    if rank > 0:
        request = uuid.uuid4().hex
        store.set(f"request/{rank}", request)
        _wait_for_key(store, f"answer/{request}", timeout_s, hint)
        attempt = store.get(f"answer/{request}").decode()
        store.set(f"{attempt}/confirmed/{rank}", "")
        return attempt
    attempt, answered, end_s = f"attempt/{uuid.uuid4().hex}", set(), time.monotonic() + timeout_s
    while missing := [other for other in range(1, size) if not store.check([f"{attempt}/confirmed/{other}"])]:
        if store.check([_CONFLICT]):
            time.sleep(3 * _MAX_PERIOD_S)  # for the others to see it, before the store ends with this process
        _raise_if_conflict(store)
        if time.monotonic() > end_s:
            raise RunError(f"{format_ranks(missing)} of {size} did not start within {timeout_s:g} s. {hint}")
        requests = [f"request/{other}" for other in missing]
        if store.check(requests):
            for request in set(store.multi_get(requests)) - answered:
                store.set(f"answer/{request.decode()}", attempt)
                answered.add(request)
        time.sleep(_PERIOD_S)
    return attempt


def _wait_for_key(store: "Store", key: str, timeout_s: float, hint: str) -> None:
    """Wait until rank 0 has written `key`.

    Raises RunError after `timeout_s`; `dist.Store.wait` would log C++ warnings.
    """
    end_s, period_s = time.monotonic() + timeout_s, _PERIOD_S
    while not store.check([key]):
        _raise_if_conflict(store)
        if time.monotonic() > end_s:
            raise RunError(f"rank 0 has not answered within {timeout_s:g} s. {hint}")
        time.sleep(period_s)
        period_s = min(2 * period_s, _MAX_PERIOD_S)


def _raise_if_conflict(store: "Store") -> None:
    """Raise the UserError that another rank has stored, if one has."""
    if store.check([_CONFLICT]):
        raise UserError(store.get(_CONFLICT).decode())
