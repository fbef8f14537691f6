"""The training state as pieces of global tensors, which is how a checkpoint holds it."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minidist.fault.index import Index
from minidist.fault.layout import Piece
from minidist.spec import Box, ParamSpec
from minidist.train.step import Engine

PARAMETERS = "params/"


def pieces(engine: Engine) -> Iterator[Piece]:
    """Everything a resumed run needs besides its position: parameters, buffers and the optimizer's state."""
    rank = engine.groups.world.rank
    for name, parameter in engine.parameters.items():
        yield from _boxes(PARAMETERS + name, engine.specs[name], parameter, rank)
    for name, parameter in engine.parameters.items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield from _optimizer_piece(engine, name, key, value, rank)
    for name, buffer in engine.model.named_buffers():
        shape = tuple(buffer.shape)
        yield Piece(f"buffers/{name}", shape, Box.whole(shape), buffer, writes=rank == 0)


def prepare(engine: Engine, index: Index) -> None:
    """Make the optimizer state that the checkpoint has and a fresh optimizer makes only in its first step.

    A parameter that no step has used has no state, there as here.
    """
    names = {stored.split("/", 1)[1]: None for stored in index.tensors if _key(stored) is not None}
    for name in names.keys() & engine.parameters.keys():
        parameter, state = engine.parameters[name], engine.optimizer.state
        for stored, tensor in index.tensors.items():
            if _key(stored) is not None and stored.split("/", 1)[1] == name:
                like = torch.zeros_like(parameter) if tensor.shape else torch.zeros((), dtype=torch.float32)
                state[parameter][_key(stored)] = like


def _key(stored: str) -> str | None:
    """`exp_avg` of `optimizer.exp_avg/name`; None for what is not optimizer state."""
    kind = stored.split("/", 1)[0]
    return kind.removeprefix("optimizer.") if kind.startswith("optimizer.") else None


def _optimizer_piece(engine: Engine, name: str, key: str, value: Tensor, rank: int) -> Iterable[Piece]:
    stored, spec = f"optimizer.{key}/{name}", engine.specs[name]
    if value.dim():
        return _boxes(stored, spec, value, rank)
    return [Piece(stored, (), Box((), ()), value, writes=spec.owner == rank)]


def _boxes(stored: str, spec: ParamSpec, tensor: Tensor, rank: int) -> Iterator[Piece]:
    flat, at = tensor.detach().view(-1), 0
    for box in spec.boxes:
        yield Piece(stored, spec.shape, box, flat[at : at + box.numel].view(box.shape), writes=spec.owner == rank)
        at += box.numel
