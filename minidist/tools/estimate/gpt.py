"""`minidist estimate --block gpt`: activations and FLOPs of Megatron's GPT, as Korthikanti et al. 2022 publish them.

arXiv 2205.05198: activations in section 4 (table 2), FLOPs in appendix A. The block has biases, a feed-forward layer of
4 h with GELU, three dropouts, and attention that materialises its scores; activations have 16 bits, masks 8. The
package's own model has a fused attention kernel instead; the comparison shows how much memory the kernel saves.
"""

import dataclasses
import json
import textwrap
from dataclasses import dataclass

from minidist.config import Config, PrecisionConfig
from minidist.errors import UserError
from minidist.tools.estimate import activations, flops, saved_tensors
from minidist.tools.estimate.failures import checkpoint_intervals_json, print_checkpoint_intervals
from minidist.tools.estimate.flops import MeasuredStep
from minidist.tools.estimate.goodput import FailureModel
from minidist.tools.estimate.layout import RunLayout, plan_layout
from minidist.tools.simulate.draw import WIDTH

_RECOMPUTED = {"none": "", "selective": "core", "block": "layer"}
_NOTES = (
    "The block is that of Megatron's GPT (arXiv 2205.05198): hidden size, heads, layers and vocabulary come from "
    "the --model options; its feed-forward layer has 4 h features, every query head has its own key-value head, and "
    "dropout is on.",
    "layer_saved_bytes: the tensors that one layer saves for backward on each tensor-parallel rank, in 16 bits, for "
    "the largest micro-batch. Model states, messages and the bubble are estimated for the package's own model only "
    "(--block llama).",
)
_SELECTIVE = (
    "hardware FLOPs: as published, which adds the FLOPs of core attention's forward and backward again (s / 3h); "
    "recomputing only its forward would cost a third of that addition (2 s / 9h)."
)


@dataclass(frozen=True)
class _GptEstimate:
    """Parameters, FLOPs and saved activations of Megatron's GPT model on a layout."""

    layout: RunLayout

    @property
    def num_parameters(self) -> int:
        """The number of parameters: 12 h^2 + 13 h per layer, learned positions, a tied embedding and the final norm."""
        model = self.layout.config.model
        h = model.hidden_size
        layers = model.num_layers * (12 * h * h + 13 * h)
        return layers + (model.vocab_size + self.layout.config.data.seq_len) * h + 2 * h

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs per token of forward and backward: `72 l h^2 (1 + s/(6h) + v/(12 l h))` (appendix A)."""
        layers, h, s, vocabulary = self._published_symbols
        return 72 * layers * h * h + 12 * layers * h * s + 6 * h * vocabulary

    @property
    def hardware_flops_per_token(self) -> int:
        """FLOPs per token of forward, backward and recomputation.

        Selective recomputation: `72 l h^2 (1 + s/(3h) + v/(12 l h))` (appendix A); block: a whole forward per layer.
        """
        layers, h, s, _ = self._published_symbols
        recomputed = {"none": 0, "selective": 12 * h * s, "block": 24 * h * h + 4 * h * s}
        return self.flops_per_token + layers * recomputed[self.layout.config.recompute]

    @property
    def _published_symbols(self) -> tuple[int, int, int, int]:
        """(l, h, s, v): the number of layers, hidden size, sequence length and vocabulary size."""
        model = self.layout.config.model
        return model.num_layers, model.hidden_size, self.layout.config.data.seq_len, model.vocab_size

    @property
    def layer_saved_tensors(self) -> list[activations.LocalTensor]:
        """The tensors that one layer saves for backward on one rank, for the largest micro-batch."""
        saved = saved_tensors.drop_recomputed(saved_tensors.GPT_BLOCK, _RECOMPUTED[self.layout.config.recompute])
        return activations.list_local_tensors(self.layout, saved, self.layout.largest_micro_batch_size)


def _estimate_gpt(config: Config, ranks: int) -> _GptEstimate:
    """Estimate a GPT model with the sizes of `config.model` on `ranks` ranks.

    Raises UserError for a run that `minidist train` would refuse, and if `config.mesh.cp` is above 1.
    """
    if config.mesh.cp > 1:
        raise UserError(
            f"--mesh.cp is {config.mesh.cp}, and the figures of --block gpt are published without context parallelism: "
            "give --mesh.cp 1."
        )
    model, seq_len = config.model, config.data.seq_len
    gpt_sizes = {"intermediate_size": 4 * model.hidden_size, "num_kv_heads": model.num_heads}
    model = dataclasses.replace(model, **gpt_sizes, max_seq_len=max(seq_len, model.max_seq_len))
    return _GptEstimate(plan_layout(dataclasses.replace(config, model=model, precision=PrecisionConfig("fp16")), ranks))


def main(
    config: Config, ranks: int, as_json: bool, measured: MeasuredStep | None, failures: FailureModel | None
) -> int:
    """Estimate Megatron's GPT model, print the result as text or (`as_json`) as JSON, and return exit code 0.

    The result has parameters, FLOPs and the activations that a layer saves. measured: if given, also print MFU and HFU.
    failures: if given, also print the best time between saves. Raises UserError for a run that `minidist train` would
    refuse, and for context parallelism.
    """
    result = _estimate_gpt(config, ranks)
    document = _gpt_json(result, measured)
    if as_json:
        print(json.dumps(document | checkpoint_intervals_json(failures)))
        return 0
    model_flops, hardware_flops = document["flops_per_step"], document["hardware_flops_per_step"]
    print(f"{ranks} rank{'s' * (ranks > 1)}, {result.layout.mesh}; GPT block, {result.num_parameters:,} parameters")
    print(f"FLOPs per step: {model_flops:.4g}; with recomputation: {hardware_flops:.4g}")
    if measured is not None:
        print(flops.describe_utilisation(measured, model_flops, hardware_flops, ranks))
    print(f"a layer saves {document['layer_saved_bytes']:,} bytes for backward:\n")
    for tensor in result.layer_saved_tensors:
        print(f"  {tensor.name:<22} {'x'.join(map(str, tensor.shape)):>20}  {tensor.dtype:<8} {tensor.bytes:>16,}")
    print()
    for note in document["notes"]:
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))
    print_checkpoint_intervals(failures)
    return 0


def _gpt_json(result: _GptEstimate, measured: MeasuredStep | None) -> dict:
    """Return the document that `--json` prints. measured: a measured step, from which MFU and HFU are computed; both
    are None without one."""
    layout, saved = result.layout, result.layer_saved_tensors
    tokens, world = layout.config.train.global_batch * layout.config.data.seq_len, layout.mesh.world_size
    model_flops, hardware_flops = result.flops_per_token * tokens, result.hardware_flops_per_token * tokens
    return {
        "block": "gpt",
        "world_size": world,
        "mesh": layout.mesh.sizes,
        "parameters": result.num_parameters,
        "tokens_per_step": tokens,
        "flops_per_token": result.flops_per_token,
        "flops_per_step": model_flops,
        "hardware_flops_per_step": hardware_flops,
        **flops.utilisation_json(measured, model_flops, hardware_flops, world),
        "layer_saved_bytes": sum(tensor.bytes for tensor in saved),
        "layer_saved_tensors": [tensor._asdict() | {"bytes": tensor.bytes} for tensor in saved],
        "notes": [*_NOTES, *([_SELECTIVE] if layout.config.recompute == "selective" else [])],
    }
