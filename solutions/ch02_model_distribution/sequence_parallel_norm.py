"""Norms in sequence parallelism: the solution, as it stands in minidist.parallel.tensor.split.

In plain tensor parallelism every rank computes the norms on all tokens: the work is repeated, and every rank keeps
the same activations. With the sequence sharded between the tensor-parallel regions, each rank normalizes its own
tokens. An all-reduce is a reduce-scatter followed by an all-gather, so the number of bytes sent does not grow.

The price is one more case to handle. The weight of a norm is replicated, but each rank now applies it to some of the
tokens, so its gradient is partial. Without a sum over the ranks the replicas of the norms diverge while the loss
falls; Megatron-LM and GPT-NeoX both shipped this bug. Here the parameter's description says `partial`, and the
gradient reducer sums every gradient that is marked so.

Usual wrong answers:
* does not shard the sequence
* marks the norms as partial without sequence parallelism, too
* shards the sequence even if `sequence_parallel` is False
* calls the package's function
* returns a fixed loss, whatever the model computes
* marks every replicated or sharded parameter as partial
* marks only the norms, and forgets key and value heads with several holders
* forgets the norm after the last layer
* marks the last norm only
* marks no norm, so their replicas diverge
* swaps the two operators
* removes the whole model
"""

from dataclasses import replace

from torch import nn

from minidist.comm import Group
from minidist.parallel.tensor.linear import ColumnParallelLinear
from minidist.parallel.tensor.operators import region_operators
from minidist.parallel.tensor.split import ParamShard, _attention, _Cutter, _enter_once, _feed_forward, _own_positions
from minidist.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelLoss
from minidist.parameters import Box, named_parameters
from minidist.validation import validate_tensor_parallel


def apply_tensor_parallel(model: nn.Module, group: Group, sequence_parallel: bool = False) -> dict[str, ParamShard]:
    """Shard `model` in place over the ranks of `group`; return this rank's shards, by global parameter name.

    model: a Transformer, or a pipeline stage's part of one. All ranks must pass equal models, and feed them the same
    batches. Afterwards every rank computes the loss of the full model, and without labels the model returns this
    rank's columns of the logits, (b, s, vocab / ranks). Norms are replicated. Raises ValueError if the group size does
    not divide the model's sizes (`validate_tensor_parallel`).

    sequence_parallel: use sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between
    tensor-parallel regions each rank has an equal part of the sequence. The number of bytes sent is the same, and the
    activations that norms, dropout and the residual stream save for backward are sharded. A norm then processes a part
    of the tokens, so its gradients are partial.
    """
    config, size = model.config, group.size
    validate_tensor_parallel(config, size)
    everyone = tuple(range(size))
    held = {name: ParamShard(Box.whole(tuple(p.shape)), everyone) for name, p in named_parameters(model).items()}
    if size == 1:
        return held
    enter, leave = region_operators(group, sequence_parallel)
    cutter = _Cutter(group, held)
    for index, layer in enumerate(model.model.layers):
        if f"model.layers.{index}.self_attn.q_proj.weight" not in held:
            continue  # another stage of the pipeline holds it
        for module in (layer.self_attn, layer.mlp):
            _enter_once(module, enter)
        _attention(layer.self_attn, leave, config, cutter, f"model.layers.{index}.self_attn")
        _feed_forward(layer.mlp, leave, cutter, f"model.layers.{index}.mlp")
    first, _ = cutter.range(config.vocab_size)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    rows = None
    if embedding in held:
        rows = cutter.cut(embedding, model.model.embed_tokens.weight, 0)
        model.model.embed_tokens = VocabParallelEmbedding(rows, first, leave)
    if model.model.norm.weight is not None:  # the end of the model is here
        # A tied head has no name of its own in `held`: `tie` gives it the embedding's parameter.
        model.lm_head = ColumnParallelLinear(cutter.cut(head, model.lm_head.weight, 0) if head in held else rows, enter)
        model.loss = VocabParallelLoss(first, group)
    model.tie_weights()
    if sequence_parallel:
        for name in [name for name in held if name.endswith("norm.weight")]:
            held[name] = replace(held[name], partial=True)
        model.model.register_forward_pre_hook(_own_positions(group), with_kwargs=True)
    return held
