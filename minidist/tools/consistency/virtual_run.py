"""Asynchronous training of a model in simulated time: a server and any number of workers in one process.

`python -m minidist.tools.consistency.virtual_run` measures 1,000 updates of 64 workers on a small model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from minidist.config import Config, DataConfig, OptimConfig, TrainConfig
from minidist.data.corpus import open_corpus
from minidist.data.loader import Batch, Loader, evaluation_loader
from minidist.learning_rate import learning_rate
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters, replicated_specs
from minidist.precision.dtypes import cast_parameters
from minidist.precision.policy import resolve_policy
from minidist.simple.consistency import Server, asynchronous_worker
from minidist.tools.consistency.clock import Durations, Timeline, run_on_virtual_clock
from minidist.train.optimizer import make_optimizer, set_learning_rate


@dataclass(frozen=True)
class VirtualRun:
    """The result of an asynchronous run in simulated time.

    losses: for each update, the mean token loss, in nats, of the worker's batch. held_out_loss: at the end, in nats per
    token. staleness: for each update, the number of other updates between the worker's pull and its push (see
    `Server`). timeline: when the updates occurred. parameters: at the end, by name. drifts: if measured, after every n
    updates (n: the number of workers), the root mean square distance of the parameters that the workers compute with
    from their mean, without workers that are in their last step or done.
    """

    losses: Sequence[float]
    held_out_loss: float
    staleness: Sequence[int]
    timeline: Timeline
    parameters: dict[str, Tensor]
    drifts: Sequence[float] = ()


class _FlatModel:
    """A model whose parameters are views of one flat tensor, and an optimizer of them."""

    def __init__(self, config: Config):
        self.model = Transformer(config.model)
        init_parameters(self.model, config.train.seed)
        cast_parameters(self.model, resolve_policy(config.precision))
        self.parameters = named_parameters(self.model)
        self.flat = nn.utils.parameters_to_vector(self.parameters.values()).detach().clone()
        for parameter, part in self.split(self.flat):
            parameter.data = part
        self.optimizer = make_optimizer(config.optim, self.parameters, replicated_specs(self.model, (0,)))

    def split(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Pair each parameter with its part of a flat tensor, as a view of its shape."""
        parts = flat.split([parameter.numel() for parameter in self.parameters.values()])
        return [(p, part.view(p.shape)) for p, part in zip(self.parameters.values(), parts, strict=True)]


def train_on_virtual_clock(
    config: Config,
    durations: Durations,
    staleness_bound: int | None = None,
    num_updates: int | None = None,
    measure_drift: bool = False,
) -> VirtualRun:
    """Train a model with asynchronous workers and a server, all in this process, in simulated time.

    durations: of each worker. A step of the configuration is a push of every worker, and the optimizer updates after
    every push: plain SGD with staleness_bound 0 is synchronous training. Each worker computes its part of each global
    batch. The gradient is that of w_i times the worker's loss sum, divided by the weighted number of tokens of the
    global batch; each worker's gradient is clipped separately. num_updates: instead of config.train.steps, at least
    this many updates.
    measure_drift: whether to compute `VirtualRun.drifts`.
    """
    workers, train, data = len(durations.compute_s), config.train, config.data
    steps = train.steps if num_updates is None else -(-num_updates // workers)
    corpus = open_corpus(data.source, data.path, data.seq_len)
    loader = Loader(corpus.train, data.seq_len, train.seed, min_length=data.min_length)
    weights = data.weights or (1.0,) * workers
    central, local, losses = _FlatModel(config), _FlatModel(config), []
    pulled: dict[int, Tensor] = {}
    drifts: list[float] = []

    def part(step: int, worker: int) -> Batch:
        [batch] = loader.micro_batches(step * train.global_batch, train.global_batch, worker, workers, 1, data.shares)
        return batch

    @lru_cache(maxsize=64)  # workers are at about the same step
    def count_tokens(step: int) -> float:
        return sum(weight * part(step, worker).num_loss_tokens for worker, weight in enumerate(weights))

    def compute_of(worker: int):
        def compute(values: Tensor, step: int) -> Tensor:
            batch, total = part(step, worker), count_tokens(step)
            local.flat.copy_(values)
            pulled[worker] = values
            if step + 1 == steps:  # its last
                del pulled[worker]
            loss_sum, count = local.model(batch.tokens, batch.labels)
            local.model.zero_grad()
            (loss_sum * weights[worker] / total).backward()
            if config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(local.model.parameters(), config.optim.clip_norm)
            losses.append(float(loss_sum.detach() / count))
            return torch.cat([p.grad.reshape(-1) for p in local.parameters.values()])

        return compute

    def update(parameters: Tensor, gradient: Tensor) -> None:
        set_learning_rate(central.optimizer, learning_rate(config.optim, len(server.staleness) // workers, steps))
        for parameter, grad in central.split(gradient):
            parameter.grad = grad
        central.optimizer.step()
        if measure_drift and (len(server.staleness) + 1) % workers == 0 and len(pulled) > 1:
            own = torch.stack(list(pulled.values()))
            drifts.append(float((own - own.mean(0)).norm()) / len(own) ** 0.5)

    server = Server(central.flat, update, workers, staleness_bound)
    made = [asynchronous_worker(compute_of(worker), steps) for worker in range(workers)]
    timeline = run_on_virtual_clock(server, made, durations)
    held_out = evaluation_loader(corpus.held_out, data.seq_len, train.eval_samples)
    with torch.no_grad():
        central.model.eval()
        sums = [
            torch.stack(central.model(batch.tokens, batch.labels)[:2]).double()
            for batch in held_out.micro_batches(0, held_out.num_samples, 0, 1, -(-held_out.num_samples // 32))
        ]
    loss_sum, count = torch.stack(sums).sum(0).tolist()
    parameters = {name: p.detach().clone() for name, p in central.parameters.items()}
    return VirtualRun(losses, loss_sum / count, server.staleness, timeline, parameters, drifts)


def main() -> None:
    """Print the real and CPU time of simulating 1,000 updates of 64 workers, whose durations vary by up to 50 %."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    config = Config(
        model=ModelConfig(**small),
        data=DataConfig(source="synthetic", seq_len=32),
        optim=OptimConfig(kind="sgd", lr=3.0, weight_decay=0.0, warmup_steps=2),
        train=TrainConfig(global_batch=256),
    )
    torch.set_num_threads(1)  # a model this small is slower on every further thread
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run = train_on_virtual_clock(config, Durations([1.0] * 64, [0.1] * 64, spread=0.5), num_updates=1000)
    parameters = sum(parameter.numel() for parameter in run.parameters.values())
    print(
        f"{len(run.staleness):,} updates of 64 workers, {parameters:,} parameters: "
        f"{time.perf_counter() - start_s:.1f} s ({time.process_time() - start_cpu_s:.1f} s of CPU time), and "
        f"{run.timeline.end_s:.1f} s on the virtual clock. Staleness {min(run.staleness)} to {max(run.staleness)}; "
        f"loss {run.losses[0]:.3f}, held out at the end {run.held_out_loss:.3f}."
    )


if __name__ == "__main__":
    main()
