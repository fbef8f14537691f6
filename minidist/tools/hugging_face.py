"""Convert a `ModelConfig` to the config of Hugging Face's Llama, which has the same parameter names."""

from minidist.models.config import ModelConfig

_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}


def to_llama_config(config: ModelConfig) -> dict:
    """Return the model configuration as keyword arguments for `transformers.LlamaConfig`.

    Dropout is left out: Llama does not have it.
    """
    return {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
