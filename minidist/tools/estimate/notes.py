"""What the numbers of an estimate mean, and what is not in them: said with them."""

from minidist.tools.estimate import activations, blocks
from minidist.tools.estimate.estimate import Estimate
from minidist.tools.estimate.layout import Layout
from minidist.validation import find_warnings

_AGAIN = {"none": "nothing", "block": "the forward of every layer", "selective": "the core of attention"}


def notes(found: Estimate) -> list[str]:
    """One sentence each."""
    layout = found.layout
    said = [
        "k, M, G are powers of 1000. Ranks of one column may differ by a little: it has the largest of each.",
        "memory: of all tensors at the moment of a step when they are most; the lines below it are its parts at that "
        "moment, and what is more at another one is said behind them. Not in it: Python and torch themselves (some "
        "0.2 GB a process), what kernels use for themselves, and evaluation.",
        "activations: what is kept for backward, as torch's kernels for CPU keep it; a GPU's may keep other tensors. "
        "buffers: gradients of activations, messages, copies, rows that are whole for a while. minidist train "
        "--memory FILE measures all of it.",
        "FLOPs: those of the model, forward and backward, attention counted whole; MFU is of them. HFU is of those and "
        f"of what is computed again: {_AGAIN[layout.config.recompute]}.",
    ]
    said += find_warnings(layout.config, layout.mesh)
    if any(cost.segment_bytes for cost in found.ranks):
        said.append(
            "mapped segments: this rank's part of the shared memory through which ranks of one machine talk (shm), "
            "beside the tensors; 0 over gloo and nccl."
        )
    if layout.config.recompute == "selective":
        said.append(_selective(layout))
    if layout.config.compile:
        said.append("compile: what a compiled layer keeps its compiler decides; activations are those of plain layers.")
    if layout.mesh.cp > 1:
        said.append(
            "A causal ring skips half of attention's FLOPs, and so does the kernel of ulysses; each rank does its "
            "equal share of the rest."
        )
    if layout.mesh.tp > layout.config.model.num_kv_heads:
        said.append(
            f"{layout.config.model.num_kv_heads} key and value heads over tp={layout.mesh.tp}: several ranks hold, and "
            "compute, the same one; FLOPs count it once."
        )
    if found.timeline is not None:
        said.append(
            "bubble: with operations as long as their FLOPs, the gradients of inputs and of weights each as long as a "
            "forward's products; minidist simulate takes measured times."
        )
    return said


def _selective(layout: Layout) -> str:
    """What selective recomputation does for this run: with a fused kernel, next to nothing."""
    samples = max(layout.micro_batches(dp)[0] for dp in range(layout.mesh.dp))
    whole, left = (activations.size(layout, of(layout), samples) for of in (blocks.forward, blocks.layer))
    less = f"recompute selective: a layer keeps {whole - left:,} bytes less of {whole:,}"
    if layout.mesh.cp > 1 and layout.config.parallel.context == "ulysses":
        return f"{less}, the copies of heads that ranks exchanged; they are exchanged again."
    return (
        f"{less}. It is void: the fused kernel keeps no scores, only a number per query and head, and the core of "
        "attention is computed twice for that. --recompute block saves memory."
    )
