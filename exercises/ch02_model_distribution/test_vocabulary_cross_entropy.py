"""Tests of vocabulary_cross_entropy: the reference is torch's cross-entropy on the full logits, in float64."""

import torch
import torch.nn.functional as F

from exercises.observations import PeakMemory
from exercises.testing import Wrong, expect, test

IGNORE_INDEX = -100
TOLERANCE = 1e-12  # sums of a few dozen terms of about 1, in float64 in another order


def parts(vocabulary, size):
    """Return where the columns of each rank begin and end; the first ranks may have one more."""
    cuts = [rank * (vocabulary // size) + min(rank, vocabulary % size) for rank in range(size + 1)]
    return [slice(first, end) for first, end in zip(cuts, cuts[1:], strict=False)]


class Case:
    """Logits (2, 5, vocabulary) and labels that are equal on all ranks, and this rank's columns."""

    def __init__(self, answer, world, network, vocabulary=11, scale=3.0):
        generator = torch.Generator().manual_seed(vocabulary)
        self.logits = scale * torch.randn(2, 5, vocabulary, generator=generator, dtype=torch.float64)
        self.labels = (torch.arange(10).view(2, 5) * 3) % vocabulary  # on all ranks
        self.labels[0, 1] = self.labels[1, 4] = IGNORE_INDEX
        self.columns = parts(vocabulary, world.size)[world.rank]
        self.mine = self.logits[..., self.columns].clone().requires_grad_()
        self.loss = answer.VocabParallelLoss(self.columns.start, network.group)

    def one_process(self, factor=1.0):
        """Return the loss sum, and the gradient of `factor` times that sum for this rank's columns."""
        whole = self.logits.clone().requires_grad_()
        total = F.cross_entropy(whole.flatten(0, 1), self.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        (factor * total).backward()
        return total.detach(), whole.grad[..., self.columns]


@test(points=4, ranks=(1, 2, 3, 4))
def loss_is_that_of_one_process(answer, world, network):
    """Every rank has the sum of the counted losses, also if the vocabulary is not divisible."""
    for vocabulary in (12, 11, 4):
        case = Case(answer, world, network, vocabulary)
        total, count = case.loss(case.mine, case.labels)
        expect(f"the loss of 8 labels, {vocabulary} tokens in the vocabulary", total, case.one_process()[0],
               tolerance=TOLERANCE * 10)  # fmt: skip
        expect("the number of counted labels", count, 8)


@test(points=4, ranks=(1, 2, 3, 4))
def gradients_are_those_of_one_process(answer, world, network):
    """This rank's logits get the gradients of one process, and are not modified."""
    for factor in (1.0, -0.5):
        case = Case(answer, world, network)
        kept = case.mine.detach().clone()
        total, _ = case.loss(case.mine, case.labels)
        (factor * total).backward()
        got, expected = case.mine.grad, case.one_process(factor)[1]
        expect(f"the gradient of this rank's logits, of {factor} x the loss", got, expected, tolerance=TOLERANCE)
        expect("the logits afterwards", case.mine.detach(), kept)


@test(points=3, ranks=(2, 3))
def large_logits(answer, world, network):
    """Logits in the thousands do not overflow, whichever rank has the largest."""
    case = Case(answer, world, network, scale=2000.0)
    total, _ = case.loss(case.mine, case.labels)
    total.backward()
    expected, grad = case.one_process()
    expect("the loss of large logits", total, expected, tolerance=1e-8)  # of about 1e4, to 12 digits
    expect("their gradient", case.mine.grad, grad, tolerance=TOLERANCE)


@test(points=4, ranks=(2, 4))
def logits_are_not_gathered(answer, world, network):
    """Three numbers per position are reduced, for any vocabulary, and none in backward."""
    for vocabulary in (12, 400):
        case, before = Case(answer, world, network, vocabulary), len(network.records)
        total, _ = case.loss(case.mine, case.labels)
        forward = network.records[before:]
        total.backward()
        total_bytes = sum(record.payload_bytes for record in forward)
        names = sorted({record.name for record in forward})
        expect(f"operations for a vocabulary of {vocabulary}", names, ["all_reduce"])
        if total_bytes > 3 * 10 * 8:
            what = f"bytes reduced for 10 positions and a vocabulary of {vocabulary}"
            raise Wrong("wrong", what, f"at most {3 * 10 * 8}", str(total_bytes))
        expect("messages in backward", len(network.records) - before - len(forward), 0)


@test(points=3, ranks=(4,))
def no_memory_for_all_logits(answer, world, network):
    """Forward and backward need less memory than the full logits."""
    case = Case(answer, world, network, 8000)
    whole = case.logits.nelement() * 8
    with PeakMemory() as memory:
        total, _ = case.loss(case.mine, case.labels)
        total.backward()
    expect("the gradient", case.mine.grad.sum(), case.one_process()[1].sum(), tolerance=1e-9)
    if memory.peak_bytes > whole:
        limit = f"{whole // 1000} kB: this rank has {whole // 4000} kB of logits"
        raise Wrong("wrong", "peak memory", f"at most {limit}", f"{memory.peak_bytes // 1000} kB")
