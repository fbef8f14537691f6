"""The small models of chapters 05 (on an engine of the fast trainer) and 06 (all parameters in one flat tensor)."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minidist.comm import Meter, World, bind
from minidist.config import CommConfig, Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig, ZeroConfig
from minidist.data.loader import Batch, Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.train.engine import Engine

SEQ_LEN = 32
# Odd sizes, so that no flat buffer is divisible by four.
ODD_SHAPE = ModelConfig(
    vocab_size=128, hidden_size=50, intermediate_size=111, num_layers=4, num_heads=5, num_kv_heads=5
)
SHAPE = ModelConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
_BF16_GRADIENTS = PrecisionConfig(policy="bf16", grad_accum="bf16")


def make_loader(num_tokens: int) -> Loader:
    """Return a loader of generated text of so many tokens, with samples of SEQ_LEN tokens."""
    return Loader(generate_text(num_tokens), seq_len=SEQ_LEN, seed=0)


def make_config(
    stage: int,
    precision: PrecisionConfig = _BF16_GRADIENTS,
    micro_batches: int = 1,
    batch: int = 16,
    bucket_mib: float = 0.04,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008  frozen
    **zero,
) -> Config:
    """Return the configuration of ODD_SHAPE at a ZeRO stage. batch: samples per step. zero: options of ZeroConfig."""
    return Config(
        model=ODD_SHAPE, data=DataConfig(seq_len=SEQ_LEN), mesh=mesh, precision=precision,
        zero=ZeroConfig(stage=stage, **zero), comm=CommConfig(bucket_mib=bucket_mib),
        train=TrainConfig(global_batch=batch, micro_batches=micro_batches),
    )  # fmt: skip


def build_engine(config: Config, world: World, backend: str | None = None) -> Engine:
    """Collective: return an engine of the fast trainer for the configuration's model; its meter has no records yet.

    backend: of its groups, as in `bind`: torch's name, or None for that of the default group.
    """
    model, mesh = Transformer(config.model), config.mesh_of(world.size)
    init_parameters(model, seed=0)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter(), backend=backend)
    engine = Engine(parallelize(model, groups, config), groups, config.optim, seed=0)
    groups.meter.records.clear()  # forget the broadcast that made the replicas equal
    return engine


def step_micro_batches(engine: Engine, config: Config, step: int, loader: Loader) -> Sequence[Batch]:
    """Return the micro-batches of a step on this rank."""
    mesh, size = engine.groups.mesh, config.train.global_batch
    dp_rank = mesh.coords(engine.groups.world.rank)["dp"]
    return loader.micro_batches(step * size, size, dp_rank, mesh.dp, config.train.micro_batches)


def state_tensors(engine: Engine) -> dict[str, list[Tensor]]:
    """Return the model states that this rank stores, by kind: parameters, gradients, masters and moments."""
    members = getattr(engine.reducer, "members", [])  # none in stage 0 with a single dtype
    flat_params, gradients = [member.flat_param for member in members], [member.gradients for member in members]
    tensors_by_kind = {
        "parameters": [t for flat_param in flat_params for t in (flat_param.full_buffer, flat_param.shard)],
        "gradients": [t for each in gradients for t in each.live_tensors()],
        "masters": [flat_param.masters.tensor for flat_param in flat_params if flat_param.masters.separate],
        "moments": [t for state in engine.optimizer.state.values() for t in state.values()],
    }
    return {kind: [t for t in tensors if t is not None] for kind, tensors in tensors_by_kind.items()}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the values of some tensors."""
    return hashlib.sha256(b"".join(t.detach().float().numpy().tobytes() for t in tensors)).hexdigest()


def build_model(dtype: torch.dtype = torch.float32) -> tuple[Transformer, Tensor]:
    """Return a transformer of SHAPE and its flat parameter, of which each of its parameters is a view."""
    model = Transformer(SHAPE)
    init_parameters(model, seed=0)
    flat_param = parameters_to_vector(model.parameters()).detach().to(dtype)
    vector_to_parameters(flat_param, model.parameters())
    return model, flat_param


def gradient(model: Transformer, batch: Batch, divisor: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the loss sum of a batch and the flat gradient of scale * (loss sum / divisor), in the model's dtype."""
    model.zero_grad()
    loss_sum, _ = model(batch.tokens, batch.labels)
    (loss_sum * (scale / divisor)).backward()
    return loss_sum.detach(), parameters_to_vector(p.grad for p in model.parameters())
