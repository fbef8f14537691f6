"""Configurations, engines and batches of the tests that compare saved activations with the estimate."""

import dataclasses
from collections import Counter

import torch

from minidist.comm import World, bind
from minidist.config import Config, DataConfig, MeshConfig, ParallelConfig, PrecisionConfig, TrainConfig
from minidist.data.loader import Batch
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.precision.policy import TORCH_NAMES
from minidist.tools.estimate import activations
from minidist.tools.estimate.layout import RunLayout
from minidist.train.engine import Engine

SEQ_LEN = 24
# Sizes for which two different formulas do not give the same number by accident.
MODEL = {"vocab_size": 56, "hidden_size": 32, "intermediate_size": 44, "num_heads": 4, "num_kv_heads": 2}


def make_config(mesh: dict, parallel: dict | None = None, **model) -> Config:
    return Config(
        model=ModelConfig(**{**MODEL, "num_layers": 2, **model}),
        mesh=MeshConfig(**{"dp": 1, **mesh}),
        parallel=ParallelConfig(**(parallel or {})),
        data=DataConfig(seq_len=SEQ_LEN),
    )


def with_dtype(config: Config, dtype: str) -> Config:
    """The same configuration with every tensor in this dtype, a name of torch's."""
    policy = {torch_name: name for name, torch_name in TORCH_NAMES.items()}[dtype]
    return dataclasses.replace(config, precision=PrecisionConfig(policy))


def build_engine(world: World, config: Config, dtype: str) -> Engine:
    config = with_dtype(config, dtype)
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config))
    model = Transformer(config.model).to(getattr(torch, dtype))
    engine = Engine(parallelize(model, groups, config), groups, config.optim, seed=1)
    engine.model.train()
    return engine


def random_batch(samples: int, vocabulary: int) -> Batch:
    tokens, labels = torch.randint(vocabulary, (2, samples, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return Batch(tokens.clone(), labels.clone(), torch.arange(samples))


def estimate_saved_tensors(layout: RunLayout, samples: int) -> Counter:
    (chunk,) = layout.model_chunks
    tensors = activations.list_local_tensors(layout, activations.saved_by_chunk(layout, chunk), samples)
    return Counter((tensor.dtype, tensor.bytes) for tensor in tensors)


MICRO_BATCH_SIZES = (3, 2, 2, 2)


def pipeline_config(schedule: str, **model) -> Config:
    config = make_config({"pp": 2}, {"schedule": schedule}, **{"num_layers": 5, **model})
    return dataclasses.replace(
        config, train=TrainConfig(global_batch=sum(MICRO_BATCH_SIZES), micro_batches=len(MICRO_BATCH_SIZES))
    )
