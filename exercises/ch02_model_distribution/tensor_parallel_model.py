"""The model, with and without sequence parallelism.

Put your layers into a Transformer that knows nothing of parallelism, so that it computes the loss and the gradients of
one process. `minidist train --engine simple --mesh.tp 2` calls this function, on each pipeline stage's part of a model.

model: a minidist Transformer, changed in place. You may replace its modules, also by ones of your own; the parameters
keep their names. group.size divides heads, features and vocabulary. Its parts: model.model.embed_tokens; the layers,
model.model.layers, each with layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm and layer.mlp;
model.model.norm; model.lm_head, an nn.Linear (V, h); model.loss(logits, labels), which model(tokens, labels) returns. A
pipeline stage has nn.Identity in place of what other stages have of layers, embedding, last norm and head; head and
last norm are on one stage. If model.config.tie_embeddings, head and embedding are one parameter, and the head's stage
has the embedding, too.
sequence_parallel: each rank has s / n tokens outside of the regions, from the embedding to the head, and the norms work
on these only. After a backward each .grad is that of one process: the whole gradient, or this rank's shard of it.
Example: 2 ranks, one layer, V = 10, h = 4, untied. Afterwards lm_head.weight is (5, 4) on each rank, and model.loss
    takes logits (b, s, 5) and all labels. With sequence_parallel, s = 6 and a norm whose outputs have the gradient
    1, and normalized inputs 1, 2, 3 on rank 0 and 4, 5, 6 on rank 1: its weight's gradient is 6 + 15 = 21 on both.

Checked: loss and gradients of a model of two layers on 1 to 4 ranks against one process in float64, with and without
sequence parallelism, tied and untied, with one key head per rank, several and fewer; names and shapes of all
parameters; the logits of each rank; three steps of SGD; the parts of three pipeline stages; the tokens that norms see;
and the collectives of activations in forward and backward: four all-reduces per layer, one each for embedding and head,
and with sequence parallelism an all-gather and a reduce-scatter in place of each, which send as many bytes.

You may call:
    Region(group), SequenceParallelRegion(group)   region.enter(x) at the head, as at every layer: exercise 2.1
    TensorParallelAttention(attention, region, heads_group), TensorParallelMLP(mlp, region): exercise 2.2
    shard_weight(module, dim, group), sum_replica_gradients(group, *parameters): exercise 2.2
    VocabParallelEmbedding(embedding, region), vocab_parallel_loss(logits, labels, group): exercise 2.3
    model.tie_weights()   makes the head use the embedding's weight, if config.tie_embeddings and the model has both
    nn.Module.register_forward_pre_hook(hook)   before forward(*args), hook(module, args) returns the new args, a tuple
    functools.partial(function, group=group)   the function with this argument fixed

Check it with: python -m exercises check tensor_parallel_model

Stub 97705d53.
"""

from functools import partial

from torch import nn

from minidist.comm import Group
from minidist.simple.tensor_parallel import (
    Region,
    SequenceParallelRegion,
    TensorParallelAttention,
    TensorParallelMLP,
    VocabParallelEmbedding,
    shard_weight,
    sum_replica_gradients,
    vocab_parallel_loss,
)


def apply_tensor_parallel(
    model: nn.Module, group: Group, heads_group: Group | None = None, sequence_parallel: bool = False
) -> None:
    """Shard a Transformer over the ranks of `group`, in place; parameters keep their names.

    heads_group: the ranks that hold a replica of this rank's key-value heads, None if there is no other. A module that
    another pipeline stage holds (`nn.Identity`) is left alone.
    """
    raise NotImplementedError("shard layers, embedding, head and loss; sum partial gradients of norms")
