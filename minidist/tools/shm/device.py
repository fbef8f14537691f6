"""One group for all devices: what lies on a GPU goes to another group inside, or through the host."""

import functools

from torch import Tensor


def by_device(*old: str):
    """Let another group do it when the first tensor is on a GPU. old: what torch 2.11 calls the method."""

    def wrap(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            tensor = _first(args)
            if tensor is None or not on_gpu(tensor):
                return method(self, *args, **kwargs)
            cuda = self.on_cuda()
            name = next(name for name in (method.__name__, *old) if hasattr(cuda, name))
            return getattr(cuda, name)(*args, **kwargs)

        return call

    return wrap


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _first(args) -> Tensor | None:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
        if isinstance(arg, (list, tuple)) and (found := _first(arg)) is not None:
            return found
    return None
