"""Torch learns of the backend as soon as both are there, in whichever order they are imported.

minidist is imported in moments and torch in seconds, so `import minidist` must not import torch. If torch is there, the
backend is registered at once; else a finder waits on `sys.meta_path` for the import of torch.distributed, adds the
registration to the end of it, and is gone. What the backend itself needs is imported when its first group is made.
"""

import sys

NAME = "shm"
_TORCH = "torch.distributed.distributed_c10d"


def register_soon() -> None:
    """Register the backend now if torch.distributed is imported, else when it is."""
    if hasattr(sys.modules.get(_TORCH), "Backend"):
        _register()
    elif not any(isinstance(finder, _Awaits) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaits())


class _Awaits:
    """Finds no module itself: when torch.distributed is looked for, it has the registration done after its import."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TORCH:
            return None
        import importlib.util  # some milliseconds that `import minidist` need not take

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            inner = spec.loader.exec_module

            def exec_module(module) -> None:
                inner(module)
                _register()

            spec.loader.exec_module = exec_module
        return spec


def _register() -> None:
    backend = sys.modules[_TORCH].Backend
    if NAME not in backend.backend_list:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options, backend_options):
    from minidist.tools.shm.start import create

    return create(options, backend_options)
