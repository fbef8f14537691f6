"""Registration of the backend with torch, whether torch or `minidist.tools.shm` is imported first.

Importing torch takes seconds, so `import minidist.tools.shm` must not import it. If torch.distributed has been
imported, `register_backend` registers the backend at once. Otherwise it places a finder on `sys.meta_path`; when
torch.distributed is imported later, the finder appends the registration to that import and removes itself. The modules
of the backend are imported when its first group is made.
"""

import sys

from minidist.tools.shm.name import NAME

_TORCH = "torch.distributed.distributed_c10d"


def register_backend() -> None:
    """Register the backend "shm" with torch: now, or as soon as torch.distributed is imported."""
    if hasattr(sys.modules.get(_TORCH), "Backend"):
        _register()
    elif not any(isinstance(finder, _TorchImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchImportHook())


class _TorchImportHook:
    """A finder that registers the backend at the end of the import of torch.distributed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TORCH:
            return None
        import importlib.util  # some milliseconds that importing this package need not take

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
    """Register the backend with torch.distributed, unless it is registered."""
    backend = sys.modules[_TORCH].Backend
    if NAME not in backend.backend_list:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options, backend_options):
    """Create a process group of the backend; its modules are imported here, when torch needs the first group."""
    from minidist.tools.shm.group_creation import create_group

    return create_group(options, backend_options)
