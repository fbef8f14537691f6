"""The model, with and without sequence parallelism: the solution, as it stands in minidist.simple.tensor_parallel.

The model itself does not change: its modules are replaced by layers with the same interface, so residuals and norms
do not know that they see a part of the tokens. The head is a column-parallel layer whose output is never put
together; its input enters the region like that of any other layer. Forgetting this gives the right loss and wrong
gradients everywhere below the head.

The weight of a norm is replicated. In plain tensor parallelism every rank applies it to all tokens and has its whole
gradient; with sequence parallelism each applies it to its own tokens, and the gradient is a partial sum. Without a
sum over the ranks the replicas of the norms diverge while the loss falls. Colossal-AI and InternLM had this fault and
fixed it (pull requests #4915 and #443).

Usual wrong answers:
* ties embedding and head of every model
* does not shard attention, which then gets some of the tokens if the sequence is sharded
* calls the package's own function
* returns 3 as the loss
* does not shard the embedding: with sequence parallelism every rank begins with all tokens
* sums the gradients of all parameters over the ranks with sequence parallelism, also those of shards
* shards the layers from the second one on
* sums the norms of the first layer and the last norm
* gathers the head's input without a gradient of its own: the loss is right, everything below has partial gradients
* shards the head also on a stage that does not have it
* does not pass heads_group on, so shared key and value heads keep partial gradients
* sums key and value heads over all ranks, whoever holds them
* forgets the norm after the last layer
* sums the gradient of the last norm on a stage that has the embedding, where only a head makes it partial
* keeps the model's own loss, which takes this rank's logits for all of them
* sums the gradients of the norms without sequence parallelism, too
* sums no gradient of a norm, so the replicas of the norms diverge
* sums the norms over the ranks that share a key head, where there are such ranks
* leaves two parameters where the model had one tied to another
* leaves the model as it is, and takes its logits for a shard
* sums one norm of each layer
* shards the sequence, whatever was asked for
* is plain tensor parallelism, whatever was asked for: every norm sees all tokens
* shards what another pipeline stage holds
* sums what has accumulated in .grad of the norms: in the second backward the first one's gradients are summed again
* returns 0 as the loss
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
    region = SequenceParallelRegion(group) if sequence_parallel else Region(group)
    decoder, norms = model.model, []
    for layer in decoder.layers:
        if not isinstance(layer, nn.Identity):
            layer.self_attn = TensorParallelAttention(layer.self_attn, region, heads_group)
            layer.mlp = TensorParallelMLP(layer.mlp, region)
            norms += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    if not isinstance(decoder.embed_tokens, nn.Identity):
        decoder.embed_tokens = VocabParallelEmbedding(decoder.embed_tokens, region)
    if not isinstance(model.lm_head, nn.Identity):
        shard_weight(model.lm_head, 0, group).register_forward_pre_hook(lambda _, args: (region.enter(*args),))
        model.loss = partial(vocab_parallel_loss, group=group)
        norms.append(decoder.norm.weight)
        model.tie_weights()
    if sequence_parallel:  # a norm outside of the regions sees this rank's tokens only
        sum_replica_gradients(group, *norms)
