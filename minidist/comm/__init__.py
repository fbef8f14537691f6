"""The one door to the network: nothing outside this folder calls torch.distributed.

`bind` makes the groups of a mesh, the door's operations move tensors through them, the meter counts every byte, the
board says where each rank stands, and the watchdog turns a deadlock into a sentence.

What needs torch is imported when it is first asked for: whoever only watches boards, as the parent of the ranks does,
starts a second sooner and leaves a core to the ranks that import it at the same time.
"""

import importlib

_MODULES = {
    "objects": ("exchange", "gather_objects"),
    "collectives": (
        "CommError",
        "Handle",
        "Transfer",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "batch",
        "broadcast",
        "recv",
        "reduce_scatter",
        "send",
    ),
    "group": ("Group", "Groups", "bind"),
    "meter": ("Meter", "Record"),
    "group_specs": ("Use",),
    "world": ("World",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # asked for once
    return value
