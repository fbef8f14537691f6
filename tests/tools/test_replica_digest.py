"""Replica digests: every flipped bit changes the digest, and a wrong replica is found, named and repaired."""

import contextlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import World, bind
from minidist.config import CheckpointConfig, FaultConfig, MeshConfig, OptimConfig, ZeroConfig
from minidist.errors import RunError, UserError
from minidist.mesh import Mesh
from minidist.tools.chaos.injector import flip_bit_of_first_element
from minidist.tools.config_warnings import find_warnings, validate_options
from minidist.tools.replica_check import ReplicaCheckObserver, replicated_tensors
from minidist.tools.replica_digest import ReplicaCheck, ReplicatedTensor, compute_digests
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer
from minidist.validation import validate
from tests.helpers.small_run import Stop, small_config, train_small, with_changes, write_text

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def digest(tensor):
    (value,) = compute_digests([tensor])
    return value


def flip(data, bit):
    changed = data.clone()
    changed.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
    return changed


tensors = st.builds(
    lambda seed, size, dtype: torch.randint(
        0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).view(dtype),
    st.integers(0, 2**32),
    st.integers(2, 300),
    st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]),
)


@given(tensors, st.data())
def test_one_or_two_flipped_bits_change_the_digest(tensor, data):
    bits = st.integers(0, 8 * tensor.numel() * tensor.element_size() - 1)
    first, second = data.draw(bits), data.draw(bits)
    assert digest(flip(tensor, first)) != digest(tensor)
    if first != second:
        assert digest(flip(flip(tensor, first), second)) != digest(tensor)


@given(tensors, st.data())
def test_two_flipped_signs_change_the_digest(tensor, data):
    """The sign is the highest bit: in a sum of multiples of it modulo 2**64, pairs would cancel."""
    places = st.lists(st.integers(0, tensor.numel() - 1), min_size=2, max_size=4, unique=True)
    changed = tensor
    for place in data.draw(places):
        changed = flip(changed, 8 * tensor.element_size() * (place + 1) - 1)
    assert digest(changed) != digest(tensor)


@given(tensors, st.data())
def test_two_swapped_elements_change_the_digest(tensor, data):
    i, j = data.draw(st.integers(0, tensor.numel() - 1)), data.draw(st.integers(0, tensor.numel() - 1))
    order = list(range(tensor.numel()))
    order[i], order[j] = j, i
    swapped = tensor[order]
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (digest(swapped) == digest(tensor)) == same


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_digests_whatever_the_strides_and_nan_and_zeros_count_by_their_bits(dtype):
    tensor = torch.arange(24).view(4, 6).to(dtype)
    view = torch.zeros(6, 8, dtype=dtype).t()[2:6]
    view.copy_(tensor)
    assert not view.is_contiguous() and digest(view) == digest(tensor)
    assert digest(tensor[1:]) != digest(tensor[:-1]) or dtype == torch.bool
    assert digest(torch.tensor(1, dtype=dtype)) == digest(torch.tensor([1], dtype=dtype))
    if dtype.is_floating_point:
        assert digest(tensor * torch.nan) == digest(tensor * torch.nan)
        assert digest(torch.zeros(3, dtype=dtype)) != digest(-torch.zeros(3, dtype=dtype))


def test_chunks_of_a_large_tensor_cannot_be_swapped_and_an_empty_tensor_has_a_digest(monkeypatch):
    monkeypatch.setattr("minidist.tools.replica_digest.CHUNK", 16)
    tensor = torch.arange(50, dtype=torch.float32)
    swapped = torch.cat([tensor[16:32], tensor[:16], tensor[32:]])
    assert len({digest(tensor), digest(swapped), digest(flip(tensor, 8 * 4 * 49)), digest(tensor[:0])}) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_is_the_same_on_cuda(dtype):
    tensor = torch.randn(3_000_001).mul(50).to(dtype)
    assert digest(tensor.cuda()) == digest(tensor)


def differences_on_rank(world, sets, flips):
    """Compare a tensor per set of ranks (and a second one, equal everywhere) where `flips` (rank, set) are wrong."""
    groups = bind(world, Mesh(dp=world.size))
    mine = [
        ReplicatedTensor(name, torch.arange(5.0) + at, ranks)
        for at, ranks in enumerate(sets)
        if world.rank in ranks
        for name in (f"a{at}", f"b{at}")
    ]
    for rank, name in flips:
        for entry in mine if rank == world.rank else ():
            if entry.name == name:
                flip_bit_of_first_element(entry.tensor, bit_from_highest=rank)
    check = ReplicaCheck(groups["control"], step=3)
    found = check.find_differences(7, mine)
    last = check.last_equal_step
    if found and all(difference.healthy_rank is not None for difference in found):
        check.repair(found, mine)
        assert check.find_differences(8, mine) == [] and check.last_equal_step == 8
        assert all(
            torch.equal(entry.tensor, torch.arange(5.0) + int(entry.name[1])) for entry in mine if len(entry.ranks) > 1
        )
    return [(d.name, d.replicas, d.wrong_ranks, d.healthy_rank) for d in found], last


@pytest.mark.parametrize(
    ("sets", "flips", "expected"),
    [
        ([(0, 1, 2, 3)], [], []),
        ([(0, 1, 2, 3)], [(2, "a0")], [("a0", (0, 1, 2, 3), (2,), 0)]),
        ([(0, 1, 2, 3)], [(0, "b0")], [("b0", (0, 1, 2, 3), (0,), 1)]),
        ([(0, 1, 2, 3)], [(1, "a0"), (3, "a0")], [("a0", (0, 1, 2, 3), (0, 1, 2, 3), None)]),
        ([(0, 1, 2, 3)], [(1, "a0"), (3, "b0")], [("a0", (0, 1, 2, 3), (1,), 0), ("b0", (0, 1, 2, 3), (3,), 0)]),
        ([(0, 1), (2, 3), (0, 2, 3), (1,)], [(3, "a2"), (1, "a3")], [("a2", (0, 2, 3), (3,), 0)]),
        ([(0, 1), (2, 3)], [(3, "b1")], [("b1", (2, 3), (2, 3), None)]),
    ],
)
def test_wrong_replicas_are_named_on_every_rank_and_repaired_by_the_majority(ranks, sets, flips, expected):
    for found, last in ranks(differences_on_rank, 4, sets, flips):
        assert sorted(found) == expected
        assert last == (3 if expected else 7)


LAYOUTS = {
    "dp": (3, {}),
    "tp": (2, {"mesh__tp": 2}),
    "dp x tp": (4, {"mesh__tp": 2}),
    "tp, sequence": (2, {"mesh__tp": 2, "parallel__sequence": True}),
    "cp": (2, {"mesh__cp": 2}),
    "dp x pp, tied": (4, {"mesh__pp": 2, "model__num_layers": 2, "model__tie_embeddings": True}),
    "zero 1": (3, {"zero": ZeroConfig(stage=1)}),
    "zero 1, hybrid": (4, {"zero": ZeroConfig(stage=1, shard=2)}),
    "zero 3, hybrid": (4, {"zero": ZeroConfig(stage=3, shard=2)}),
    "bf16": (3, {"precision__policy": "bf16"}),
    "stochastic rounding": (3, {"precision__policy": "bf16", "precision__master": "stochastic"}),
    "muon": (3, {"optim__kind": "muon"}),
}


# Replicas that train separately, as (ranks, options).
SEPARATE = {
    "local": (3, {"consistency__mode": "local", "consistency__h": 2}),
    "diloco": (3, {"consistency__mode": "diloco", "consistency__h": 2}),
    "int8": (3, {"consistency__mode": "diloco", "consistency__h": 2, "consistency__exchange": "int8"}),
    "fragments": (
        3,
        {
            "consistency__mode": "diloco",
            "consistency__h": 2,
            "consistency__fragments": 2,
            "model__num_layers": 2,
        },
    ),
    "zero 1 inside": (
        4,
        {"consistency__mode": "diloco", "consistency__h": 2, "consistency__replicas": 2, "zero__stage": 1},
    ),
    "bf16, tp inside": (
        4,
        {"consistency__mode": "local", "consistency__h": 2, "mesh__tp": 2, "precision__policy": "bf16"},
    ),
    "gossip": (4, {"consistency__mode": "gossip", "consistency__h": 2, "consistency__replicas": 2}),
}


def layout_config(folder, text, changes, **more):
    return small_config(
        folder,
        text,
        **{
            "optim": OptimConfig(warmup_steps=2),
            "train__steps": 4,
            "checkpoint": CheckpointConfig(every=0),
            "fault__digest_every": 1,
            **changes,
            **more,
        },
    )


@pytest.mark.parametrize("name", LAYOUTS | SEPARATE)
def test_a_run_without_faults_finds_no_difference_in_any_layout(ranks, tmp_path, name):
    size, changes = (LAYOUTS | SEPARATE)[name]
    summaries = ranks(train_small, size, layout_config(tmp_path / "run", write_text(tmp_path), changes))
    assert [summary["step"] for summary in summaries] == [4] * size
    assert any(summary["held_out_loss"] > 0 for summary in summaries)


class Flip(Observer):
    """Flips a bit of the largest replicated tensor of that kind on one rank when `step` steps are done."""

    def __init__(self, kind, rank, step):
        self.kind, self.rank, self.step, self.name, self.notes = kind, rank, step, None, []

    def before_step(self, trainer):
        if trainer.progress.step == self.step:
            state = [r for r in replicated_tensors(trainer.engine) if len(r.ranks) > 1 and r.name.startswith(self.kind)]
            if not state:
                return
            largest = max(state, key=lambda entry: entry.tensor.numel())
            self.name = largest.name
            if trainer.world.rank == self.rank:
                flip_bit_of_first_element(largest.tensor, bit_from_highest=12)  # of the mantissa

    def on_note(self, line):
        self.notes.append(line)


def train_with_a_flip(world, config, kind, wrong, step, flip_kind=Flip):
    """Train with that flip; return the tensor's name, the notes, the error, and the replicas and digests at the end."""
    torch.set_num_threads(1)
    flip, error = flip_kind(kind, wrong, step), None
    with contextlib.closing(Trainer(world, config, [flip, ReplicaCheckObserver()])) as trainer:
        try:
            trainer.run(Stop())
        except RunError as failure:
            error = str(failure)
        state = list(replicated_tensors(trainer.engine))
        digests = compute_digests(entry.tensor for entry in state)
    return flip.name, flip.notes, error, {e.name: (e.ranks, d) for e, d in zip(state, digests, strict=True)}


FLIPS = [
    ("dp", "params/", 3, {}),
    ("dp", "optimizer.exp_avg/", 3, {}),
    ("tp", "params/model.norm", 4, {"mesh__tp": 2}),
    ("tp", "optimizer.exp_avg_sq/model.norm", 4, {"mesh__tp": 2}),
    ("pp", "params/", 6, {"mesh__pp": 2, "model__num_layers": 2}),
    ("zero 3, hybrid", "masters/", 6, {"zero": ZeroConfig(stage=3, shard=2)}),
    ("zero 1, hybrid", "optimizer.exp_avg/", 6, {"zero": ZeroConfig(stage=1, shard=2)}),
    ("bf16", "masters/", 3, {"precision__policy": "bf16"}),
]


@pytest.mark.parametrize(("layout", "kind", "size", "changes"), FLIPS, ids=[f"{f[0]} {f[1]}" for f in FLIPS])
def test_a_flipped_bit_is_found_named_and_repaired(ranks, tmp_path, layout, kind, size, changes):
    config = layout_config(tmp_path / "run", write_text(tmp_path), changes, fault__repair=True, train__steps=5)
    wrong = size - 1
    results = ranks(train_with_a_flip, size, config, kind, wrong, 2)
    name = results[wrong][0]
    assert name is not None, "no tensor of this kind is compared"
    for _, (note,), error, _ in results:
        assert error is None
        assert re.match(rf"step 3: rank {wrong} not equal to the other replicas \(ranks? [\d, -]*\) in ", note), note
        assert name in note or " more" in note
        assert "at step 2 all replicas were equal. They are equal again: copied from rank" in note
    for key, (holders, _) in results[wrong][3].items():
        assert len({results[rank][3][key][1] for rank in holders}) == 1, key


@pytest.mark.parametrize(("repair", "size", "said"), [(False, 3, "--fault.repair would"), (True, 2, "nobody knows")])
def test_a_run_ends_if_a_difference_is_not_to_be_repaired_or_nobody_knows_which_replica_is_right(
    ranks, tmp_path, repair, size, said
):
    config = layout_config(tmp_path / "run", write_text(tmp_path), {}, fault=FaultConfig(digest_every=2, repair=repair))
    results = ranks(train_with_a_flip, size, config, "params/", 1, 2)
    for _, _, error, _ in results:
        assert said in error and "at step 2 all replicas were equal" in error and error.startswith("step 4: rank")
        assert "No checkpoint had been written yet." in error


def test_replicas_are_compared_before_every_checkpoint(ranks, tmp_path):
    config = layout_config(
        tmp_path / "run", write_text(tmp_path), {}, fault__digest_every=100, checkpoint__every=3, train__steps=5
    )
    results = ranks(train_with_a_flip, 3, config, "params/", 1, 2)
    assert all(result[2].startswith("step 3: rank 1 not equal") for result in results)
    assert not any((tmp_path / "run" / "checkpoints").glob("step-*"))


class FlipAtMerge(Flip):
    """The flip happens on one rank after the merge of a step, before any observer behind this one sees the step."""

    def before_step(self, trainer):
        pass

    def on_step(self, trainer, result):
        super().before_step(trainer)


@pytest.mark.parametrize(
    ("layout", "kind", "every", "found_at"),
    [
        ("diloco", "outer.start", 3, 3),  # between two merges
        ("diloco", "outer.velocity", 2, 2),
        ("local", "params", 100, 4),  # before the checkpoint at the end, which follows a merge
        ("fragments", "params/model.layers.0", 1, 2),
        ("zero 1 inside", "outer.start", 1, 2),
        ("bf16, tp inside", "masters", 1, 2),
    ],
)
def test_a_replica_that_a_merge_leaves_different_is_found(ranks, tmp_path, layout, kind, every, found_at):
    size, changes = SEPARATE[layout]
    config = layout_config(tmp_path / "run", write_text(tmp_path), changes, fault__digest_every=every)
    step = 4 if every == 100 else 2
    results = ranks(train_with_a_flip, size, config, kind, size - 1, step, FlipAtMerge)
    for name, _, error, _ in results:
        assert name.startswith(kind) and error.startswith(f"step {found_at}: rank"), error
        assert name in error or " more" in error


def test_a_check_between_merges_is_made_up_for_after_the_next_merge(ranks, tmp_path):
    """A merge every 2 steps and a check every 3: the parameters of step 4 are compared, not those of step 3."""
    changes = {"consistency__mode": "local", "consistency__h": 2, "train__steps": 8, "fault__digest_every": 3}
    config = layout_config(tmp_path / "run", write_text(tmp_path), changes)
    results = ranks(train_with_a_flip, 3, config, "params", 2, 4, FlipAtMerge)
    assert all(error.startswith("step 4: rank 2 not equal") for _, _, error, _ in results)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("asynchronous", "each rank has the parameters of its own last pull, .* no two ranks hold tensors that must"),
        ("gossip", "the replicas differ until the last step, and each of them has one rank here, .* Leave --fault.di"),
    ],
)
def test_a_check_without_anything_to_compare_is_refused(mode, message):
    config = small_config(None, None, consistency__mode=mode, fault__digest_every=1)
    config = with_changes(config, consistency__h=2) if mode == "gossip" else config
    with pytest.raises(UserError, match=message):
        validate_options(config, 2)
    if mode == "gossip":
        config = with_changes(config, consistency__replicas=2)
        [warning] = find_warnings(config, validate_options(config, 4))
        assert warning.startswith("fault.digest-every 1 compares the ranks inside each of the 2 replicas")


def test_options_that_make_no_sense_are_refused(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    with pytest.raises(UserError, match="fault.repair true has no effect"):
        validate_options(with_changes(config, fault__repair=True), 2)
    with pytest.raises(UserError, match="fault.digest-every"):
        validate(with_changes(config, fault__digest_every=-1), 2)
    train_small(World.single(), with_changes(config, fault__digest_every=1, mesh=MeshConfig()))
