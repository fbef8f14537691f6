"""Tests of vocabulary_parallel: the reference has the full embedding and logits, on one process, in float64."""

import torch
from torch import nn

from exercises.conditions import Declaration, Drawn, Growth, check_conditions
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.simple.tensor_parallel import Region, SequenceParallelRegion

IGNORE_INDEX = -100
IGNORED, ALL = ((0, 1), (1, 4)), tuple((row, column) for row in range(2) for column in range(5))  # places of labels
COPIES = 6  # of a rank's logits that may be in memory
KEPT_COPIES = 3  # of them between forward and backward
TOLERANCE = 1e-12  # sums of a few dozen terms of about 1, in float64 in another order


def make_logits(vocabulary, scale=3.0, dtype=torch.float64):
    """Return logits (2, 5, vocabulary) that are equal on all ranks."""
    generator = torch.Generator().manual_seed(vocabulary)
    return (scale * torch.randn(2, 5, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)


def make_labels(vocabulary, ignored=IGNORED):
    """Return labels (2, 5) in the shards of all ranks, some of them ignored."""
    labels = (torch.arange(10).view(2, 5) * 3) % vocabulary
    for place in ignored:
        labels[place] = IGNORE_INDEX
    return labels


def of_one_process(logits, labels):
    """Return the sum of the counted losses, and its gradient, from the full logits."""
    logits = logits.double()
    largest = logits.amax(-1, keepdim=True)
    sums = (logits - largest).exp().sum(-1, keepdim=True)
    counted = (labels != IGNORE_INDEX)[..., None]
    at_label = torch.arange(logits.shape[-1]) == labels[..., None]  # (2, 5, V), no true element where ignored
    losses = (largest + sums.log())[..., 0] - torch.where(at_label, logits, torch.zeros_like(logits)).sum(-1)
    grad = ((logits - largest).exp() / sums - at_label.double()) * counted
    return losses[counted[..., 0]].sum(), grad


class Case:
    """Logits and labels that are equal on all ranks, and this rank's columns."""

    def __init__(self, group, each=3, scale=3.0, **labels):
        self.vocabulary = each * group.size
        self.logits, self.labels = make_logits(self.vocabulary, scale), make_labels(self.vocabulary, **labels)
        self.columns, self.group = slice(each * group.rank, each * (group.rank + 1)), group
        self.mine = self.logits[..., self.columns].clone().requires_grad_()
        self.loss, grad = of_one_process(self.logits, self.labels)
        self.grad = grad[..., self.columns]
        self.name = f"a vocabulary of {self.vocabulary} on {group.size} ranks"

    def run(self, answer):
        return answer.vocab_parallel_loss(self.mine, self.labels, self.group)


def groups_of(world, network):
    """Return the group of all ranks and, on 4 ranks, this rank's group of every other rank."""
    return [network.group, *([network.divided_group] if world.size == 4 else [])]


class EmbeddingCase:
    """An embedding of some rows per rank, tokens that occur up to three times, and what one process gets."""

    def __init__(self, answer, group, each=3, sequence=False):
        vocabulary, length = each * group.size, 2 * group.size
        full = nn.Embedding(vocabulary, 5, dtype=torch.float64)
        with torch.no_grad():
            full.weight.copy_(torch.arange(5.0 * vocabulary).view(vocabulary, 5) + 1)
        self.tokens = (torch.arange(2 * length).view(2, length) * 2 + vocabulary - 1) % vocabulary
        self.own = slice(2 * group.rank, 2 * group.rank + 2) if sequence else slice(None)
        self.rows = slice(each * group.rank, each * (group.rank + 1))
        self.full, self.weight = full.weight, full.weight.detach().clone().requires_grad_()
        self.every = self.weight[self.tokens]
        self.arriving = torch.arange(10.0 * length, dtype=torch.float64).view(2, length, 5) % 7
        self.every.backward(self.arriving)
        how = ", the sequence sharded" if sequence else ""
        self.name = f"a vocabulary of {vocabulary} on {group.size} ranks{how}"
        region = SequenceParallelRegion(group) if sequence else Region(group)
        self.layer = answer.VocabParallelEmbedding(full, region)

    def check(self):
        """Compare the embeddings and the gradient of this rank's rows with those of one process."""
        tokens = self.tokens.clone()
        out = self.layer(tokens)
        expect("the embeddings", out, self.every.detach()[:, self.own], case=self.name)
        expect("the tokens afterwards", tokens, self.tokens, case=self.name)
        out.backward(self.arriving[:, self.own])
        named = dict(self.layer.named_parameters())
        expect("names of the parameters", sorted(named), ["weight"], case=self.name)
        expect("this rank's rows", named["weight"].detach(), self.weight.detach()[self.rows], case=self.name)
        expect("the full embedding afterwards", self.full.detach(), self.weight.detach(), case=self.name)
        if named["weight"].untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr():
            raise Wrong("wrong", "the memory of this rank's rows", "its own", "that of the full embedding", self.name)
        if named["weight"].grad is None:
            raise Wrong("wrong", "the gradient of this rank's rows", "a tensor", "None", case=self.name)
        expect("the gradient of this rank's rows", named["weight"].grad, self.weight.grad[self.rows], case=self.name)


@test(points=4, ranks=(1, 2, 3, 4))
def embedding_of_one_process_in_shards(answer, world, network):
    """Every rank gets the embeddings of one process; its rows get their gradients; it stores no more than its rows."""
    for group in groups_of(world, network):
        for each in (1, 3, 8):
            EmbeddingCase(answer, group, each).check()
        EmbeddingCase(answer, group, sequence=True).check()
    weight = EmbeddingCase(answer, network.group, 3).layer.weight
    found = [weight.untyped_storage().nbytes(), weight.is_contiguous(), weight.requires_grad]
    expect("of weight: bytes of its storage, contiguous, requires_grad", found, [3 * 5 * 8, True, True])


@test(points=2, ranks=(2, 3))
def one_collective_for_the_embedding(answer, world, network):
    """The embeddings are summed once, (b, s, h), for any vocabulary; backward sends nothing with all tokens."""
    for each, sequence in ((3, False), (50, False), (3, True)):
        case, before = EmbeddingCase(answer, network.group, each, sequence), len(network.records)
        out = case.layer(case.tokens)
        forward = [(record.name, record.payload_bytes) for record in network.records[before:]]
        name, full = "reduce_scatter" if sequence else "all_reduce", case.every.numel() * 8
        expect("operations in forward, and bytes of the tensor", forward, [(name, full)], case=case.name)
        out.backward(case.arriving[:, case.own])
        backward = [record.name for record in network.records[before + 1 :]]
        expect("operations in backward", backward, ["all_gather"] if sequence else [], case=case.name)


@test(points=4, ranks=(1, 2, 3, 4))
def loss_is_that_of_one_process(answer, world, network):
    """Every rank has the sum of the counted losses, in at least float32, and their number."""
    for group in groups_of(world, network):
        for each in (1, 3, 8):
            case = Case(group, each)
            total, count = case.run(answer)
            expect("the loss of 8 labels", total, case.loss, tolerance=TOLERANCE * 10, case=case.name)
            expect("the number of counted labels", count, 8, case=case.name)
        for dtype in (torch.bfloat16, torch.float16):
            case = Case(group)
            total, _ = answer.vocab_parallel_loss(case.mine.detach().to(dtype), case.labels, group)
            rounded, _ = of_one_process(case.logits.to(dtype), case.labels)
            name = f"{dtype} logits, {case.name}"
            expect("the dtype of the loss", str(total.dtype), "torch.float32", case=name)
            expect("the loss", total.double(), rounded, tolerance=1e-4, case=name)  # of about 30, in float32
        case = Case(group, ignored=ALL)
        expect("loss and number if all labels are ignored", [x.item() for x in case.run(answer)], [0.0, 0])
        case = Case(group, ignored=())
        total, count = case.run(answer)
        expect("the loss of 10 labels", total, case.loss, tolerance=TOLERANCE * 10, case=case.name)
        expect("the number of counted labels", count, 10, case=case.name)


@test(points=4, ranks=(1, 2, 3, 4))
def gradients_are_those_of_one_process(answer, world, network):
    """This rank's logits get the gradients of one process, and are not modified."""
    for factor, ignored in ((1.0, IGNORED), (-0.5, IGNORED), (1.0, ()), (1.0, ALL)):
        case = Case(network.group, ignored=ignored)
        case.name += f", {len(ignored)} of 10 labels ignored"
        kept, labels = case.mine.detach().clone(), case.labels.clone()
        total, _ = case.run(answer)
        if not total.requires_grad:
            raise Wrong("wrong", "whether the loss has a gradient function", "yes", "no", case=case.name)
        (factor * total).backward()
        what = f"the gradient of this rank's logits, of {factor} x the loss"
        expect(what, case.mine.grad, factor * case.grad, tolerance=TOLERANCE, case=case.name)
        expect("logits and labels afterwards", [case.mine.detach(), case.labels], [kept, labels], case=case.name)


@test(points=3, ranks=(2, 3))
def large_logits(answer, world, network):
    """Logits in the thousands, positive or negative, do not overflow, whichever rank has the largest."""
    for scale, shift in ((2000.0, 0.0), (3.0, -5000.0), (3.0, 5000.0)):
        case = Case(network.group, scale=scale)
        with torch.no_grad():
            case.mine += shift
        total, _ = case.run(answer)
        total.backward()
        name = f"logits of about {scale:g}, plus {shift:g}"
        expect("the loss", total, case.loss, tolerance=1e-8, case=name)  # of about 1e4, to 12 digits
        expect("the gradient", case.mine.grad, case.grad, tolerance=1e-10, case=name)


@test(points=3, ranks=(2, 4))
def logits_are_not_gathered(answer, world, network):
    """Three numbers per position are reduced, for any vocabulary, and none in backward."""
    for each in (3, 100):
        case, before = Case(network.group, each), len(network.records)
        total, _ = case.run(answer)
        forward = network.records[before:]
        total.backward()
        total_bytes = sum(record.payload_bytes for record in forward)
        names = sorted({record.name for record in forward})
        expect("operations in forward", names, ["all_reduce"], case=case.name)
        if total_bytes > 3 * 10 * 8:
            what = "bytes reduced for 10 positions"
            raise Wrong("wrong", what, f"at most {3 * 10 * 8}", str(total_bytes), case=case.name)
        expect("messages in backward", len(network.records) - before - len(forward), 0, case=case.name)


def loss_reference(ranks, rank):
    logits, labels = torch.cat([each["logits"] for each in ranks], -1), ranks[rank]["labels"]
    return of_one_process(logits, labels)[0].to(logits.dtype), (labels != IGNORE_INDEX).sum()


# Columns per rank, dtype, and whether the logits are a view of longer ones.
DRAWS = ((3, torch.float64, False), (1, torch.float64, False), (5, torch.float32, False), (4, torch.float64, True))
GROWING = ((1000, torch.float64, False), (2000, torch.float64, False))  # between which memory is compared


def own_logits(rank, ranks, number):
    each, dtype, is_view = (*DRAWS, *GROWING)[number]
    own = make_logits(each * ranks, dtype=dtype)[..., each * rank : each * (rank + 1)]
    return own if is_view else own.contiguous()


def own_labels(ranks, number):
    return make_labels((*DRAWS, *GROWING)[number][0] * ranks)


def declarations():
    """Return a declaration for each draw, which selects logits and labels together."""
    sizes = [{name: {"draw": len(DRAWS) + number} for name in ("logits", "labels")} for number in range(len(GROWING))]
    growth = Growth(
        sizes,
        peak_bytes=lambda arguments, ranks: COPIES * arguments["logits"].nbytes,
        kept_bytes=lambda arguments, ranks: KEPT_COPIES * arguments["logits"].nbytes,
        requires_grad=("logits",),
    )
    for number in range(len(DRAWS)):
        yield Declaration(
            inputs={
                "logits": Drawn(lambda rank, ranks, other, n=number: own_logits(rank, ranks, other or n)),
                "labels": Drawn(lambda rank, ranks, other, n=number: own_labels(ranks, other or n)),
            },
            call=lambda answer, group, logits, labels: answer.vocab_parallel_loss(logits, labels, group),
            reference=loss_reference,
            replicas=True,
            roundings=100,  # sums of at most 35 exponentials, then of 10 losses
            # Three numbers per position there and back.
            max_bytes=lambda ranks: 2 * (len(ranks) - 1) * 3 * 10 * ranks[0]["logits"].element_size(),
            growth=None if number else growth,
        )


@test(points=4, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """In float64 and float32, in groups of only some ranks; memory of a few copies of this rank's logits."""
    for declaration in declarations():
        check_conditions(declaration, answer, world, network)
