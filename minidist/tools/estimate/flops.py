"""FLOPs of a step, their share of the hardware's peak (MFU and HFU), and the pipeline's bubble.

Model FLOPs are counted as `flops_per_token` counts them: attention in full although a causal kernel skips half of it,
nothing for embedding lookups, and replicated work (norms, shared key-value heads) once. Hardware FLOPs are model FLOPs
and the FLOPs of recomputation.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from minidist.config import Config
from minidist.errors import UserError
from minidist.models.config import ModelConfig
from minidist.process_groups import forward_flops_per_token
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.simulate.timeline import PipelineTimeline, StageTimes, simulate_schedule


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of forward and backward for one token of a sequence of `seq_len` tokens.

    `6 N + 12 l h s` (PaLM, arXiv 2204.02311, appendix B): each parameter costs one multiply-add in forward and two
    in backward, and attention's two matrix products cost `4 h s` forward in each of `l` layers. The full attention
    matrix is counted, although a causal kernel may skip half of it. N excludes an untied input embedding, which is
    only a lookup. Recomputation is not counted.
    """
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return 6 * (model.num_parameters() - looked_up) + 12 * model.num_layers * model.hidden_size * seq_len


def stage_flops_per_token(layout: RunLayout, stage: int) -> int:
    """Return the model FLOPs per token of forward and backward on one pipeline stage.

    It is `6 N + 12 l h s` over the layers and the head of the stage, so that the sum over all stages is
    `flops_per_token`. Recomputation is not counted.
    """
    model, total = layout.config.model, 0
    for chunk in layout.stage_chunks(stage):
        head = model.vocab_size * model.hidden_size + model.hidden_size if chunk.has_head else 0
        attention = 12 * len(chunk.layers) * model.hidden_size * layout.config.data.seq_len
        total += 6 * (len(chunk.layers) * model.num_layer_parameters() + head) + attention
    return total


def recomputes_down_projection(config: Config) -> bool:
    """Return whether full recomputation of a layer repeats the down projection, the layer's last matrix product.

    It does so only if backward needs something computed after the down projection (a dropout mask), or if the layer is
    compiled as one graph.
    """
    return config.model.dropout > 0 or config.compile


def _layer_recompute_flops(layout: RunLayout) -> int:
    """FLOPs per token that backward recomputes in one layer."""
    config = layout.config
    weights, attention, _ = forward_flops_per_token(config.model, config.data.seq_len)
    if config.recompute == "block":
        down = 2 * config.model.intermediate_size * config.model.hidden_size
        return weights + attention - (0 if recomputes_down_projection(config) else down)
    return attention if config.recompute == "selective" else 0


def stage_recompute_flops(layout: RunLayout, stage: int) -> int:
    """Return the FLOPs per token that backward recomputes on one pipeline stage; 0 without recomputation."""
    return sum(len(chunk.layers) for chunk in layout.stage_chunks(stage)) * _layer_recompute_flops(layout)


class StepFlops(NamedTuple):
    """FLOPs of one step on all ranks together.

    model: the FLOPs of forward and backward. hardware: `model` and the FLOPs of recomputation.
    """

    model: int
    hardware: int


def step_flops(layout: RunLayout) -> StepFlops:
    """Return the FLOPs of one step on all ranks together, without and with recomputation, by formula."""
    config = layout.config
    tokens = config.train.global_batch * config.data.seq_len
    per_token = flops_per_token(config.model, config.data.seq_len)
    recomputed = config.model.num_layers * _layer_recompute_flops(layout)
    return StepFlops(per_token * tokens, (per_token + recomputed) * tokens)


def simulate_pipeline(layout: RunLayout, t_comm: float = 0.0) -> PipelineTimeline | None:
    """Simulate the pipeline schedule of a layout and return its timeline; None with a single stage.

    The duration of an action is proportional to its FLOPs; the unit of time is the forward of the costliest model
    chunk. t_comm: time of a transfer between stages, in this unit. Matrix products with weights cost the same in F, B
    and W. Core attention has no weights: it costs twice as much in B as in F, and nothing in W. Recomputation adds to
    B.
    """
    if layout.schedule is None:
        return None
    weights, attention, head = forward_flops_per_token(layout.config.model, layout.config.data.seq_len)
    matmuls = [len(chunk.layers) * weights + (head if chunk.has_head else 0) for chunk in layout.model_chunks]
    core = [len(chunk.layers) * attention for chunk in layout.model_chunks]
    recomputed = [len(chunk.layers) * _layer_recompute_flops(layout) for chunk in layout.model_chunks]
    unit = max(w + a for w, a in zip(matmuls, core, strict=True))
    f = [(w + a) / unit for w, a in zip(matmuls, core, strict=True)]
    b = [(w + 2 * a + r) / unit for w, a, r in zip(matmuls, core, recomputed, strict=True)]
    return simulate_schedule(layout.schedule, StageTimes(f, b, [w / unit for w in matmuls], t_comm))


@dataclass(frozen=True)
class MeasuredStep:
    """The measured duration of a step, and the peak of the accelerators it ran on, from which MFU and HFU are computed.

    step_time_s: the duration in seconds. peak_tflops: the dense peak of one accelerator, in TFLOP/s.
    """

    step_time_s: float
    peak_tflops: float

    def utilisation(self, flops: float, num_ranks: int) -> float:
        """Return the achieved FLOP/s of the step as a fraction of the peak FLOP/s of `num_ranks` accelerators.

        flops: the FLOPs of one step on all ranks: model FLOPs give the MFU (PaLM, arXiv 2204.02311, appendix B),
        hardware FLOPs the HFU (Korthikanti et al. 2022, arXiv 2205.05198, section 6.3).
        """
        return flops / (self.step_time_s * num_ranks * self.peak_tflops * 1e12)


def parse_measured_step(step_time_s: float | None, peak_tflops: float | None) -> MeasuredStep | None:
    """Make a `MeasuredStep` from the options `--step-time-s` and `--peak-tflops`; None if neither is given.

    Raises UserError if only one is given, or a value is not positive and finite.
    """
    options = {"step-time-s": step_time_s, "peak-tflops": peak_tflops}
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} is {value}; it must be above 0.")
    missing = [name for name, value in options.items() if value is None]
    if len(missing) == 1:
        raise UserError(
            f"MFU and HFU need both the time of a step and the peak of an accelerator: also give --{missing[0]}."
        )
    return None if missing else MeasuredStep(step_time_s, peak_tflops)


def utilisation_json(
    measured: MeasuredStep | None, model_flops: float, hardware_flops: float, num_ranks: int
) -> dict[str, float | None]:
    """Return MFU and HFU as fractions under the keys "mfu" and "hfu"; both None if `measured` is None.

    model_flops, hardware_flops: the FLOPs of one step on all ranks, without and with recomputation. num_ranks: the
    number of accelerators.
    """
    flops = {"mfu": model_flops, "hfu": hardware_flops}
    return {name: None if measured is None else measured.utilisation(value, num_ranks) for name, value in flops.items()}


def describe_utilisation(measured: MeasuredStep, model_flops: float, hardware_flops: float, num_ranks: int) -> str:
    """Format MFU and HFU of a measured step, in percent, as one line of text.

    model_flops, hardware_flops: the FLOPs of one step on all ranks, without and with recomputation. num_ranks: the
    number of accelerators.
    """
    fractions = utilisation_json(measured, model_flops, hardware_flops, num_ranks)
    return (
        f"MFU {100 * fractions['mfu']:.2f} %, HFU {100 * fractions['hfu']:.2f} %: {measured.step_time_s:g} s a step on "
        f"{num_ranks} x {measured.peak_tflops:g} TFLOP/s"
    )
