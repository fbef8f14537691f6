"""The breakdown of a rank's peak memory by kind of tensor.

The caller names parameters, gradients and optimizer states; tensors that autograd saves for backward are activations;
all others are buffers: messages, copies, gradients of activations and workspaces. Live tensors are scanned whenever
autograd saves or uses one, and around every optimizer step. A storage keeps the first kind that it was labelled with
until it is freed.
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
from minidist.zero.flat_param import ShardedFlatParam
from minidist.zero.reducer import ZeroReducer

TensorLister = Callable[[], Mapping[str, Iterable[Tensor]]]


class _WeakStorage(NamedTuple):
    """A weak reference to a storage, with its address and bytes."""

    storage: StorageWeakRef
    address: int
    size: int


def _make_weak_storage(tensor: Tensor) -> _WeakStorage:
    """Return a weak reference to the tensor's storage."""
    storage = tensor.untyped_storage()
    return _WeakStorage(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())


@contextlib.contextmanager
def _observe_inner_hooks(report: Callable[[list[_WeakStorage]], None]) -> Iterator[None]:
    """A context in which inner `saved_tensors_hooks`, when they exit, pass the storages that they packed to `report`.

    Inner hooks (such as those of recomputation) replace outer ones, so the hooks of `PeakByKind` would miss these
    tensors.
    """
    original_enter, original_exit = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def enter(hooks: saved_tensors_hooks) -> None:
        packed, pack = [], hooks.pack_hook

        def record_and_pack(tensor: Tensor) -> object:
            packed.append(_make_weak_storage(tensor))
            return pack(tensor)

        # The object whose method the hook is may keep further tensors, from which it recomputes.
        attributes = tree_leaves(vars(getattr(pack, "__self__", hooks)))
        hooks.owner_tensors = [value for value in attributes if isinstance(value, Tensor)]
        hooks.pack_hook, hooks.packed = record_and_pack, packed
        original_enter(hooks)

    def leave(hooks: saved_tensors_hooks, *exception) -> None:
        original_exit(hooks, *exception)
        report([*hooks.packed, *map(_make_weak_storage, hooks.owner_tensors)])

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = original_enter, original_exit


class PeakByKind(StoragePeak):
    """Context manager that measures a rank's peak memory and how much of it each kind of tensor takes.

    list_tensors: a function without arguments that returns the live tensors by kind ("parameters", "gradients", ...).
    These tensors count even if they were allocated before the context; a storage listed under two kinds counts as the
    first. Tensors that autograd saves for backward, or recomputation keeps or recomputes, count as activations, all
    others as buffers.
    device: the device whose memory is measured; None: the CPU. After the context, `peak` is the `MemoryPeak`.
    """

    def __init__(self, list_tensors: TensorLister, device: torch.device | None = None):
        super().__init__(device)
        self._list_tensors, self._context = list_tensors, contextlib.ExitStack()

    def __enter__(self) -> "PeakByKind":
        super().__enter__()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.label_live_tensors()
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._context.callback(register(lambda *_: self.label_live_tensors()).remove)
        self._context.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._context.enter_context(_observe_inner_hooks(self._label_packed))
        return self

    def __exit__(self, *exception) -> None:
        self._context.close()
        if exception[0] is None:
            self.label_live_tensors()
        StoragePeak.__exit__(self, *exception)

    def label_live_tensors(self) -> None:
        """Call `list_tensors` and label the memory of the tensors that it returns with their kind.

        The context does this by itself whenever autograd saves or uses a tensor, and around every optimizer step. Call
        this where else tensors change kind or are freed.
        """
        self._mark_scan(_make_labels(self._storages().values()))

    def _storages(self) -> dict[int, tuple[torch.UntypedStorage, str]]:
        """Return each live storage with its kind, by identity.

        Not by address, which another storage may get once this one is freed.
        """
        storages: dict[int, tuple[torch.UntypedStorage, str]] = {}
        for kind, tensors in self._list_tensors().items():
            for tensor in tensors:
                if tensor is not None and tensor.device.type == self.device.type:
                    storage = tensor.untyped_storage()
                    storages.setdefault(storage._cdata, (storage, kind))
        return storages

    def _pack(self, tensor: Tensor) -> Tensor:
        """Label the storage of a tensor that autograd saves as activations; return the tensor."""
        storages, saved = self._storages(), tensor.untyped_storage()
        storages.setdefault(saved._cdata, (saved, ACTIVATIONS))
        self._mark_scan(_make_labels(storages.values()))
        return tensor.detach()  # saving an output itself would make a reference cycle with its own graph

    def _unpack(self, tensor: Tensor) -> Tensor:
        """Label the live tensors when backward uses a saved tensor; return the tensor."""
        self.label_live_tensors()
        return tensor

    def _label_packed(self, packed: Iterable[_WeakStorage]) -> None:
        """Label storages that inner hooks have packed as activations."""
        saved = {weak.address: (ACTIVATIONS, weak.size) for weak in packed if not weak.storage.expired()}
        self._mark_scan(saved | _make_labels(self._storages().values()))


def make_tensor_lister(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, **further_kinds: Iterable[Tensor]
) -> TensorLister:
    """Return a function that returns the parameters, gradients and optimizer states that exist now, for `PeakByKind`.

    The function returns {kind: tensors}. further_kinds: other tensors by kind, such as masters=[...]; a storage that is
    also of another kind counts as the further kind.
    """

    def list_tensors() -> dict[str, Iterable[Tensor]]:
        parameters = list(model.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            **further_kinds,
            "parameters": parameters,
            "gradients": [p.grad for p in (*parameters, *updated)],
            "states": [value for value in states if isinstance(value, Tensor)],
        }

    return list_tensors


def make_engine_tensor_lister(engine: Engine) -> TensorLister:
    """Return a function that returns the live tensors of a training engine by kind, for `PeakByKind`.

    The kinds are those of `minidist estimate`. Flat parameters and gradients that persist, or their shards, count as
    parameters and gradients, and DiLoCo's outer state and quantization errors as states; flat buffers that exist only
    while they are gathered or reduced count as buffers; tensors that a split backward keeps for weight gradients count
    as activations.
    """
    model_and_optimizer = make_tensor_lister(engine.model, engine.optimizer)

    def list_tensors() -> dict[str, Iterable[Tensor]]:
        tensors = model_and_optimizer()
        if isinstance(engine.reducer, ZeroReducer):  # parameters and gradients are views of flat tensors
            tensors = {**_zero_tensors_by_kind(engine.reducer), "states": tensors["states"]}
        if engine.merger is not None:
            merger_states = [*engine.merger.outer_states(), *engine.merger.quantization_errors()]
            tensors["states"] = [*tensors["states"], *(tensor for *_, tensor in merger_states)]
        pipeline = engine.forward_backward.pipeline
        return tensors if pipeline is None else {**tensors, ACTIVATIONS: pipeline.weight_gradient_inputs()}

    return list_tensors


def _zero_tensors_by_kind(reducer: ZeroReducer) -> dict[str, list[Tensor | None]]:
    """The tensors of ZeRO on this rank: "buffers" live only for part of a step. None: not allocated now."""
    sums = [member.gradients.result for member in reducer.members]
    tensors: dict[str, list[Tensor | None]] = {"buffers": [], "parameters": [], "gradients": sums, "masters": []}
    for flat_param in reducer.flat_params:
        tensors["parameters"].append(flat_param.shard)
        if isinstance(flat_param, ShardedFlatParam):
            tensors["buffers"].append(flat_param.full_buffer)
        if flat_param.masters.separate:
            tensors["masters" if flat_param.masters.persistent else "buffers"].append(flat_param.masters.tensor)
    return tensors


def measure_peak(
    step: Callable[[], object], list_tensors: TensorLister, device: torch.device | None = None
) -> MemoryPeak:
    """Call `step` and return the peak memory of this rank's tensors during the call.

    list_tensors: a function that returns the live tensors by kind (see `PeakByKind`). device: the device whose memory
    is measured; None: the CPU. Run one step beforehand, so that the optimizer states exist.
    """
    with PeakByKind(list_tensors, device) as measured:
        step()
    return measured.peak


def _make_labels(storages: Iterable[tuple[torch.UntypedStorage, str]]) -> Labels:
    """Return {address: (kind, bytes)} of these storages."""
    return {storage.data_ptr(): (kind, storage.nbytes()) for storage, kind in storages}
