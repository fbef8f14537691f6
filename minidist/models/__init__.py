"""A decoder-only transformer without any parallelism code. Imports only torch and `minidist.hashing`.

Names are imported lazily, so that `ModelConfig` can be used without importing torch, which takes seconds.
"""

import importlib

_HOMES = {
    "IGNORE_INDEX": "transformer",
    "DropoutAddress": "dropout",
    "ModelConfig": "config",
    "Transformer": "transformer",
    "init_parameters": "init",
    "initial_value": "init",
}

__all__ = ["IGNORE_INDEX", "DropoutAddress", "ModelConfig", "Transformer", "init_parameters", "initial_value"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
