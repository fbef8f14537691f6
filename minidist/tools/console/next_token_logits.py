"""Next-token logits of a model that is laid out over ranks, for sampling text."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minidist.comm import Groups, broadcast
from minidist.data.loader import Batch
from minidist.simple.engine import Engine as SimpleEngine
from minidist.simple.tensor_parallel import gather_features
from minidist.train.engine import Engine


@torch.no_grad()
def next_token_logits(engine: Engine, tokens: Tensor) -> Tensor:
    """Collective: compute the logits (b, vocab) of the token that follows `tokens`, (b, s) int64.

    engine: its model computes them. All ranks must call it with the same tokens; all get the same logits. Each rank of
    a context-parallel group runs the whole sequence, which grows by one token at a time.
    """
    parallel, groups = engine.parallel, engine.groups
    model, pipeline, tp = parallel.model, parallel.pipeline, groups.mesh.tp
    samples, seq_len = tokens.shape
    # Attention is causal: padding at the end changes no logits.
    missing = -seq_len % tp if parallel.sequence_parallel else 0
    padded = torch.cat((tokens, tokens.new_zeros(samples, missing)), 1)
    outputs: list[Tensor] = []

    def part(chunk: int, _: int, hidden: Tensor | None) -> Tensor:
        layers = parallel.layer_range(chunk)
        out = model(padded, layers=layers, hidden=hidden)
        if layers.stop == model.config.num_layers:
            outputs.append(out)
        return out

    with _unsharded_attention(model):
        if pipeline is not None:
            pipeline.run_forward(part, lambda _: parallel.empty_hidden(samples, padded.shape[1], tp), 1)
        else:
            outputs.append(model(padded))
    last_stage = 0 if pipeline is None else pipeline.last_part_stage
    return _gather_logits(outputs[0][:, seq_len - 1] if outputs else None, model, samples, last_stage, groups)


@torch.no_grad()
def next_token_logits_of_simple_engine(engine: SimpleEngine, tokens: Tensor) -> Tensor:
    """Collective: as `next_token_logits`, of the simple trainer's engine."""
    parallel, groups, reducer = engine.parallel, engine.groups, engine.reducer
    model, tp = parallel.model, groups.mesh.tp
    samples, seq_len = tokens.shape
    missing = -seq_len % tp if engine.config.parallel.sequence else 0
    padded = torch.cat((tokens, tokens.new_zeros(samples, missing)), 1)
    outputs: list[Tensor] = []

    def run_stage(_: int, hidden: Tensor | None) -> Tensor:
        outputs.append(model(padded, layers=parallel.layers, hidden=hidden))
        return outputs[0]

    reducer.gather_root()
    with _unsharded_attention(model):
        if parallel.pipeline is not None:
            batch = Batch(padded, padded, torch.arange(samples))
            parallel.pipeline.run_forward(run_stage, lambda _: engine.empty_hidden(batch), 1)
        else:
            run_stage(0, None)
    reducer.free_root()
    is_last = groups.mesh.coords(groups.world.rank)["pp"] == groups.mesh.pp - 1
    return _gather_logits(outputs[0][:, seq_len - 1] if is_last else None, model, samples, groups.mesh.pp - 1, groups)


def _gather_logits(local: Tensor | None, model: nn.Module, samples: int, last_stage: int, groups: Groups) -> Tensor:
    """Collective: return all logits (b, vocab) on all ranks. local: (b, vocab / tp), None on all but the last stage."""
    logits = next(model.parameters()).new_empty(samples, model.config.vocab_size)
    if local is not None:
        logits.copy_(gather_features(local, groups["tensor"]) if groups.mesh.tp > 1 else local)
    if groups.mesh.pp > 1:
        broadcast(logits, last_stage, groups["activations"])
    return logits


@contextmanager
def _unsharded_attention(model: nn.Module) -> Iterator[None]:
    """Return a context manager inside which every rank attends within its own sequences only.

    It undoes `apply_context_parallel`.
    """
    attentions = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    changed = {attention: vars(attention).pop("attend", None) for attention in attentions}
    try:
        yield
    finally:
        for attention, attend in changed.items():
            if attend is not None:
                attention.attend = attend
