"""A name for one attempt of a run under torchrun, as prefix of its keys in a store that outlives the attempt.

torchrun starts all ranks again after a failure and after nodes joined or left, and its agents keep one store for all of
these attempts. torch's process groups exchange addresses through that store, so a rank could read the address of a
rank of the previous attempt. torchrun's restart count does not identify the attempt: each agent counts its own
failures, and a node that joins changes no count.
"""

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from minidist.errors import RunError, format_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

_PERIOD_S = 0.02
OWN_STORE_HINT = (
    "If nodes have joined or left, torchrun may have passed the address of an earlier first node: set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all its agents."
)


def agree_on_attempt(store: "Store", rank: int, size: int, timeout_s: float = 600.0) -> str:
    """Return a name that only the `size` ranks of this attempt know. Collective.

    Rank 0 chooses the name. Every other rank writes a request that is unique to its process, and waits for the answer
    to this request, so it cannot take an answer from an earlier attempt for one of this attempt. Rank 0 may see
    requests of an earlier attempt; it answers them too, and looks again until all ranks have confirmed.
    Raises RunError if not all ranks have done so within `timeout_s`.
    """
    from torch.distributed import DistStoreError

    if rank > 0:
        request = uuid.uuid4().hex
        store.set(f"request/{rank}", request)
        try:
            store.wait([f"answer/{request}"], timedelta(seconds=timeout_s))
        except DistStoreError:
            raise RunError(f"rank 0 has not answered within {timeout_s:g} s. {OWN_STORE_HINT}") from None
        attempt = store.get(f"answer/{request}").decode()
        store.set(f"{attempt}/confirmed/{rank}", "")
        return attempt
    attempt, answered, end_s = f"attempt/{uuid.uuid4().hex}", set(), time.monotonic() + timeout_s
    while missing := [other for other in range(1, size) if not store.check([f"{attempt}/confirmed/{other}"])]:
        if time.monotonic() > end_s:
            raise RunError(f"{format_ranks(missing)} of {size} did not start within {timeout_s:g} s. {OWN_STORE_HINT}")
        requests = [f"request/{other}" for other in missing]
        if store.check(requests):
            for request in set(store.multi_get(requests)) - answered:
                store.set(f"answer/{request.decode()}", attempt)
                answered.add(request)
        time.sleep(_PERIOD_S)
    return attempt
