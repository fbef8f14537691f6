"""Communication: the only part of the core that calls torch.distributed.

Public: `bind` makes the process groups of a mesh from `GroupSpec`s; the operations of `collectives` take a `Group` and
return a `Handle` if asynchronous; `Meter` counts their bytes. Read in this order: `world`, `group_specs`, `group`,
`collectives`, `handles`, `wire_bytes`, `meter`, `functional` (for model code), `objects`.

Names are imported on first use, so that a process that only reads rank status does not import torch.
"""

import importlib

_MODULES = {
    "objects": ("all_gather_object", "bind_all_gather_object", "gather_object"),
    "collectives": (
        "CommError",
        "Handle",
        "P2POp",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "batch_send_recv",
        "broadcast",
        "recv",
        "reduce_scatter",
        "send",
    ),
    "group": ("Group", "Groups", "bind"),
    "meter": ("Meter", "Record"),
    "group_specs": ("GroupSpec",),
    "world": ("World",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # so that the next access does not come here
    return value
