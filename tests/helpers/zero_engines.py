"""Configurations, engines and batches of a two-layer model under any ZeRO stage and precision policy."""

from minidist.comm import Meter, bind
from minidist.config import CommConfig, Config, MeshConfig, OptimConfig, PrecisionConfig, TrainConfig, ZeroConfig
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.train.engine import Engine

# No world size of the tests divides the sizes of embedding, layer and last norm, so every flat parameter is padded.
MODEL = ModelConfig(vocab_size=129, hidden_size=6, intermediate_size=7, num_layers=2, num_heads=1, num_kv_heads=1)
BATCH, SEQ = 8, 8


def make_config(world: int, stage: int, policy: str = "fp32", micro_batches: int = 1, **more) -> Config:
    precision = {"policy": policy, **more.pop("precision", {})}
    optim = more.pop("optim", {"kind": "adamw", "clip_norm": None})
    return Config(
        model=MODEL,
        mesh=MeshConfig(dp=world),
        zero=ZeroConfig(stage=stage, **more),
        precision=PrecisionConfig(**precision),
        optim=OptimConfig(**optim),
        comm=CommConfig(),
        train=TrainConfig(global_batch=BATCH, micro_batches=micro_batches),
    )


def build_engine(world, config: Config) -> Engine:
    groups = bind(world, config.mesh_of(world.size), group_specs(config.mesh_of(world.size), config), meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, 0)
    return Engine(parallelize(model, groups, config), groups, config.optim, 0)


def local_micro_batches(world, config: Config, step: int = 0):
    train = config.train
    loader = Loader(generate_text(2000), SEQ, 0)
    return loader.micro_batches(step * BATCH, BATCH, world.rank, world.size, train.micro_batches)
