"""The breakdown of a rank's peak memory by kind of tensor.

The caller names parameters, gradients and optimizer states; tensors that autograd saves for backward are activations;
all others are buffers: messages, copies, gradients of activations and workspaces. Live tensors are scanned whenever
autograd saves or uses one, and around every optimizer step. A storage keeps the first kind it is given, for its whole
life.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from minidist.tools.memory.storages import ACTIVATIONS, Labels, MemoryPeak, StoragePeak
from minidist.train.engine import Engine
from minidist.zero.reducer import ZeroReducer

TensorsByKind = Callable[[], Mapping[str, Iterable[Tensor]]]


class _WeakStorage(NamedTuple):
    """A weak reference to a storage, with its address and bytes."""

    storage: StorageWeakRef
    address: int
    size: int


def _weak_storage(tensor: Tensor) -> _WeakStorage:
    storage = tensor.untyped_storage()
    return _WeakStorage(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())


@contextlib.contextmanager
def _observe_inner_hooks(report: Callable[[list[_WeakStorage]], None]) -> Iterator[None]:
    """Within this context `report` receives the storages that inner `saved_tensors_hooks` packed, whenever they exit.

    Inner hooks (such as those of recomputation) replace outer ones, so ours would not see these tensors.
    """
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def watch(hooks: saved_tensors_hooks) -> None:
        packed, pack = [], hooks.pack_hook

        def packing(tensor: Tensor) -> object:
            packed.append(_weak_storage(tensor))
            return pack(tensor)

        # The owner of the hook may hold more tensors, to recompute from.
        held = tree_leaves(vars(getattr(pack, "__self__", hooks)))
        hooks.held_by_owner = [value for value in held if isinstance(value, Tensor)]
        hooks.pack_hook, hooks.packed = packing, packed
        enter(hooks)

    def end(hooks: saved_tensors_hooks, *exception) -> None:
        leave(hooks, *exception)
        report([*hooks.packed, *map(_weak_storage, hooks.held_by_owner)])

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = watch, end
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave


class PeakByKind(StoragePeak):
    """Measures the peak with its breakdown by kind.

    kinds: returns the live tensors of each kind; called at every scan. Unlike with `StoragePeak`, these tensors count
    even if they were allocated before the context. A storage that two kinds name is of the first. What recomputation
    keeps for backward, and what it recomputes, counts as activations.
    """

    def __init__(self, kinds: TensorsByKind, device: torch.device | None = None):
        super().__init__(device)
        self._kinds, self._context = kinds, contextlib.ExitStack()

    def __enter__(self) -> "PeakByKind":
        super().__enter__()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.scan()
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._context.callback(register(lambda *_: self.scan()).remove)
        self._context.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._context.enter_context(_observe_inner_hooks(self._label_packed))
        return self

    def __exit__(self, *exception) -> None:
        self._context.close()
        if exception[0] is None:
            self.scan()
        StoragePeak.__exit__(self, *exception)

    def scan(self) -> None:
        """Label the live tensors. Runs whenever autograd saves or uses a tensor and around an optimizer step; call it
        where tensors change kind or die in between."""
        self._mark(_labels(self._storages().values()))

    def _storages(self) -> dict[int, tuple[torch.UntypedStorage, str]]:
        """Storage and kind, by identity; not by address, which changes when a storage is freed and refilled."""
        found: dict[int, tuple[torch.UntypedStorage, str]] = {}
        for kind, tensors in self._kinds().items():
            for tensor in tensors:
                if tensor is not None and tensor.device.type == self.device.type:
                    storage = tensor.untyped_storage()
                    found.setdefault(storage._cdata, (storage, kind))
        return found

    def _pack(self, tensor: Tensor) -> Tensor:
        storages, mine = self._storages(), tensor.untyped_storage()
        storages.setdefault(mine._cdata, (mine, ACTIVATIONS))
        self._mark(_labels(storages.values()))
        return tensor.detach()  # an output saved itself would be a reference cycle with its own graph

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.scan()
        return tensor

    def _label_packed(self, packed: Iterable[_WeakStorage]) -> None:
        saved = {each.address: (ACTIVATIONS, each.size) for each in packed if not each.storage.expired()}
        self._mark(saved | _labels(self._storages().values()))


def tensors_by_kind(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Iterable[Tensor]
) -> TensorsByKind:
    """The tensors of a model and its optimizer, for `PeakByKind`. more: further kinds (masters), named first."""

    def kinds() -> dict[str, Iterable[Tensor]]:
        parameters = list(model.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            **more,
            "parameters": parameters,
            "gradients": [p.grad for p in (*parameters, *updated)],
            "states": [value for value in states if isinstance(value, Tensor)],
        }

    return kinds


def engine_tensors_by_kind(engine: Engine) -> TensorsByKind:
    """The tensors of an engine, for `PeakByKind`, with the same kinds as `minidist estimate`.

    Persistent flat parameters, gradients and shards count as their contents; flat buffers that exist only while they
    are gathered or reduced are buffers; what a split backward keeps for weight gradients is activations.
    """
    plain = tensors_by_kind(engine.model, engine.optimizer)

    def kinds() -> dict[str, Iterable[Tensor]]:
        found = plain()
        if isinstance(engine.reducer, ZeroReducer):  # parameters and gradients are views of flat tensors
            found = {**engine.reducer.tensors_by_kind(), "states": found["states"]}
        pipeline = engine.forward_backward.pipeline
        return found if pipeline is None else {**found, ACTIVATIONS: pipeline.weight_gradient_inputs()}

    return kinds


def measure_peak(step: Callable[[], object], kinds: TensorsByKind, device: torch.device | None = None) -> MemoryPeak:
    """Run `step` and return its peak. Run a first step before, which allocates the optimizer states."""
    with PeakByKind(kinds, device) as found:
        step()
    return found.peak


def _labels(storages: Iterable[tuple[torch.UntypedStorage, str]]) -> Labels:
    return {storage.data_ptr(): (kind, storage.nbytes()) for storage, kind in storages}
