"""`minidist estimate --block gpt`: a layer and the FLOPs of Megatron's GPT, as Korthikanti et al. 2022 publish them.

arXiv 2205.05198: activations in section 4 (table 2), FLOPs in appendix A. The block has biases, a feed-forward layer of
4 h with GELU, three dropouts, and attention that writes its scores; activations have 16 bits, masks 8. Our own model is
another one, with a fused kernel: side by side the two show what that saves.
"""

import dataclasses
import json
import textwrap
from dataclasses import dataclass

from minidist.config import Config, PrecisionConfig
from minidist.errors import UserError
from minidist.tools.estimate import activations, blocks, utilisation
from minidist.tools.estimate.layout import Layout, layout_of
from minidist.tools.estimate.utilisation import Measured
from minidist.tools.simulate.draw import WIDTH

_DROPPED = {"none": "", "selective": "core", "block": "layer"}
_NOTES = (
    "The block is that of Megatron's GPT (arXiv 2205.05198): hidden size, heads, layers and vocabulary are those of "
    "--model; its feed-forward layer has 4 h features, every head keys and values of its own, and dropout is on.",
    "layer_bytes: what a layer of the largest micro-batch keeps for backward on each tensor rank, in 16 bits. States, "
    "messages and the bubble are told for our own model only (--block llama).",
)
_SELECTIVE = (
    "hardware FLOPs: as published, with the products of attention counted twice, forward and backward (s / 3h); "
    "computing them again forward costs a third of that (2 s / 9h)."
)


@dataclass(frozen=True)
class Gpt:
    """A run of that model. flops, hardware_flops: of a token."""

    layout: Layout

    @property
    def parameters(self) -> int:
        """12 h^2 + 13 h a layer, learned positions, a tied embedding and the last norm."""
        model = self.layout.config.model
        h = model.hidden_size
        layers = model.num_layers * (12 * h * h + 13 * h)
        return layers + (model.vocab_size + self.layout.config.data.seq_len) * h + 2 * h

    @property
    def flops(self) -> int:
        """Forward and backward: `72 l h^2 (1 + s/(6h) + v/(12 l h))` (appendix A)."""
        layers, h, s, vocabulary = self._sizes
        return 72 * layers * h * h + 12 * layers * h * s + 6 * h * vocabulary

    @property
    def hardware_flops(self) -> int:
        """With what is computed again: selective `72 l h^2 (1 + s/(3h) + v/(12 l h))` (appendix A), block a forward."""
        layers, h, s, _ = self._sizes
        again = {"none": 0, "selective": 12 * h * s, "block": 24 * h * h + 4 * h * s}
        return self.flops + layers * again[self.layout.config.recompute]

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        model = self.layout.config.model
        return model.num_layers, model.hidden_size, self.layout.config.data.seq_len, model.vocab_size

    @property
    def kept(self) -> list[activations.Tensor]:
        """What a layer keeps of the first micro-batch, which is the largest."""
        layout = self.layout
        samples = max(layout.micro_batches(dp)[0] for dp in range(layout.mesh.dp))
        left = blocks.without(blocks.GPT, _DROPPED[layout.config.recompute])
        return activations.on_a_rank(layout, left, samples)


def gpt(config: Config, ranks: int) -> Gpt:
    """The model of these sizes on so many ranks. Raises UserError for what cannot run, and for a context axis."""
    if config.mesh.cp > 1:
        raise UserError(
            f"--block gpt is published without context parallelism: give --mesh.cp 1, not {config.mesh.cp}."
        )
    model, seq_len = config.model, config.data.seq_len
    its = {"intermediate_size": 4 * model.hidden_size, "num_kv_heads": model.num_heads}
    model = dataclasses.replace(model, **its, max_seq_len=max(seq_len, model.max_seq_len))
    return Gpt(layout_of(dataclasses.replace(config, model=model, precision=PrecisionConfig("fp16")), ranks))


def main(config: Config, ranks: int, as_json: bool, measured: Measured | None) -> int:
    """Estimate, and print; returns the exit code. Raises UserError for what cannot run."""
    found = gpt(config, ranks)
    said = document(found, measured)
    if as_json:
        print(json.dumps(said))
        return 0
    print(f"{ranks} rank{'s' * (ranks > 1)}, {found.layout.mesh}; GPT block, {found.parameters:,} parameters")
    print(f"FLOPs a step: {said['flops_per_step']:.4g}; computed: {said['hardware_flops_per_step']:.4g}")
    if measured is not None:
        print(utilisation.line(measured, said["flops_per_step"], said["hardware_flops_per_step"], ranks))
    print(f"a layer keeps {said['layer_bytes']:,} bytes:\n")
    for tensor in found.kept:
        print(f"  {tensor.name:<22} {'x'.join(map(str, tensor.shape)):>20}  {tensor.dtype:<8} {tensor.bytes:>16,}")
    print()
    for note in said["notes"]:
        print(textwrap.fill(note, WIDTH, subsequent_indent="  "))
    return 0


def document(found: Gpt, measured: Measured | None) -> dict:
    """All that is known, for `--json`."""
    layout, kept = found.layout, found.kept
    tokens, world = layout.config.train.global_batch * layout.config.data.seq_len, layout.mesh.world_size
    model, hardware = found.flops * tokens, found.hardware_flops * tokens
    return {
        "block": "gpt",
        "world_size": world,
        "mesh": layout.mesh.sizes,
        "parameters": found.parameters,
        "tokens_per_step": tokens,
        "flops_per_token": found.flops,
        "flops_per_step": model,
        "hardware_flops_per_step": hardware,
        **utilisation.document(measured, model, hardware, world),
        "layer_bytes": sum(tensor.bytes for tensor in kept),
        "layer_keeps": [tensor._asdict() | {"bytes": tensor.bytes} for tensor in kept],
        "notes": [*_NOTES, *([_SELECTIVE] if layout.config.recompute == "selective" else [])],
    }
