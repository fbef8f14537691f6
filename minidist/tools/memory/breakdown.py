"""Where the memory of a rank goes: what the storages are that its peak consists of.

That is seen from outside, whenever something may have changed: what the caller names (parameters, gradients, states) is
that, what autograd keeps for backward is activations, and the rest is buffers: messages, copies, gradients of
activations, and what operations need while they run. A storage has one kind from its first to its last moment.
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

from minidist.tools.memory.storages import ACTIVATIONS, Look, Peak, StoragePeak
from minidist.train.engine import Engine
from minidist.zero.reducer import ShardedSink

Kinds = Callable[[], Mapping[str, Iterable[Tensor]]]


class _Named(NamedTuple):
    """A storage, which may be gone by now, and where it was."""

    storage: StorageWeakRef
    address: int
    size: int


def _named(tensor: Tensor) -> _Named:
    storage = tensor.untyped_storage()
    return _Named(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())


@contextlib.contextmanager
def _packed_by_others(tell: Callable[[list[_Named]], None]) -> Iterator[None]:
    """Within this context `tell` gets what hooks that hide those outside of them have packed, whenever they end."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def watch(hooks: saved_tensors_hooks) -> None:
        packed, pack = [], hooks.pack_hook

        def packing(tensor: Tensor) -> object:
            packed.append(_named(tensor))
            return pack(tensor)

        # Whoever packs may hold more beside, what it computes again from.
        held = tree_leaves(vars(getattr(pack, "__self__", hooks)))
        hooks.beside = [value for value in held if isinstance(value, Tensor)]
        hooks.pack_hook, hooks.packed = packing, packed
        enter(hooks)

    def end(hooks: saved_tensors_hooks, *exception) -> None:
        leave(hooks, *exception)
        tell([*hooks.packed, *map(_named, hooks.beside)])

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = watch, end
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave


class KindPeak(StoragePeak):
    """The same, and what it was. kinds: tensors by kind, those that are there at the time; called again and again.

    What `kinds` names counts too where it was there before. A storage that two kinds name is of the first.
    What others than autograd keep for backward (recomputation: inputs, and what it has made again) is activations too.
    """

    def __init__(self, kinds: Kinds, device: torch.device | None = None):
        super().__init__(device)
        self._kinds, self._context = kinds, contextlib.ExitStack()

    def __enter__(self) -> "KindPeak":
        super().__enter__()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.look()
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._context.callback(register(lambda *_: self.look()).remove)
        self._context.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._context.enter_context(_packed_by_others(self._others))
        return self

    def __exit__(self, *exception) -> None:
        self._context.close()
        if exception[0] is None:
            self.look()
        StoragePeak.__exit__(self, *exception)

    def look(self) -> None:
        """See what is there now. Called by itself whenever autograd keeps or uses a tensor, and around an update."""
        self._look(_seen(self._storages().values()))

    def _storages(self) -> dict[int, tuple[torch.UntypedStorage, str]]:
        """By identity, which an address is not: a storage may be emptied and filled again."""
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
        self._look(_seen(storages.values()))
        return tensor.detach()  # itself, an output would be kept by what it is the output of

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.look()
        return tensor

    def _others(self, packed: Iterable[_Named]) -> None:
        kept = {each.address: (ACTIVATIONS, each.size) for each in packed if not each.storage.expired()}
        self._look(kept | _seen(self._storages().values()))


def kinds_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Iterable[Tensor]) -> Kinds:
    """What a model and its optimizer hold, for `KindPeak`. more: others by kind, before these: masters, say."""

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


def kinds_of_engine(engine: Engine) -> Kinds:
    """What an engine holds, for `KindPeak`, as the estimate tells it: kept rows and shards are what they are made of,
    rows that are gathered or filled for a while are buffers, what a pipeline keeps for weight gradients is activations.
    """
    plain = kinds_of(engine.model, engine.optimizer)

    def kinds() -> dict[str, Iterable[Tensor]]:
        found = plain()
        if isinstance(engine.updates, ShardedSink):  # parameters and gradients are views of its rows
            found = {**engine.updates.by_kind(), "states": found["states"]}
        pipeline = engine.passes.pipeline
        return found if pipeline is None else {**found, ACTIVATIONS: pipeline.between_halves()}

    return kinds


def measure(step: Callable[[], object], kinds: Kinds, device: torch.device | None = None) -> Peak:
    """The peak of one step. Let one go by before, which makes the optimizer's states."""
    with KindPeak(kinds, device) as found:
        step()
    return found.peak


def _seen(storages: Iterable[tuple[torch.UntypedStorage, str]]) -> Look:
    return {storage.data_ptr(): (kind, storage.nbytes()) for storage, kind in storages}
