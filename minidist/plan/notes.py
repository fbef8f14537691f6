"""What the numbers of an estimate mean, and what is not in them: said with them."""

from minidist.plan.estimate import Estimate


def notes(found: Estimate) -> list[str]:
    """One sentence each."""
    layout = found.layout
    said = [
        "k, M, G are powers of 1000. Ranks of one column may differ by a little: it has the largest of each.",
        "memory: the sum of the lines below it. Not in it: Python and torch themselves (some 0.2 GB a process), what "
        "an operation needs while it runs, messages on their way, and evaluation.",
        "activations: what is kept for backward where most is alive, as torch's kernels for CPU keep it; a GPU's "
        "may keep other tensors.",
        "FLOPs: those of the model, forward and backward, attention counted whole; MFU is of them. Nothing is "
        "recomputed.",
    ]
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
