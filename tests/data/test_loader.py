"""The loader: the global batch depends on the position alone, in every layout."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.data.loader import Loader, evaluation_loader
from minidist.labels import IGNORE_INDEX

TOKENS = np.arange(1000, dtype=np.uint16)  # token t is its own place in the text
PINNED = [53, 1, 41, 21, 28, 16]  # positions 60..65, the last two of epoch 0 first
quick = settings(max_examples=100, deadline=None)
positions = st.integers(0, 500)
batch_sizes = st.integers(0, 40)


def loader(**options) -> Loader:
    return Loader(TOKENS, **{"seq_len": 16, "seed": 3, **options})  # 62 windows an epoch


def same(a, b) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels) and torch.equal(a.samples, b.samples)


def joined(batches):
    return tuple(torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "labels", "samples"))


def is_the_batch(batches, whole) -> bool:
    return all(map(torch.equal, joined(batches), (whole.tokens, whole.labels, whole.samples)))


def test_a_sample_is_a_window_and_its_labels_are_the_next_tokens():
    source = loader()
    batch = source.global_batch(5, 20)
    assert batch.tokens.shape == batch.labels.shape == (20, 16)
    assert batch.tokens.dtype == batch.labels.dtype == batch.samples.dtype == torch.int64
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.tokens[:, 0].tolist() == (source.window_indices(5, 20) * 16).tolist()
    assert batch.samples.tolist() == list(range(5, 25))
    assert batch.num_loss_tokens == 20 * 16


def test_every_window_comes_once_an_epoch_and_every_token_is_a_label_once():
    source = loader()
    assert source.num_samples == 62
    for epoch in range(3):
        labels = source.global_batch(epoch * 62, 62).labels
        assert sorted(labels.flatten().tolist()) == list(range(1, 62 * 16 + 1))


def test_epochs_have_different_orders_and_a_seed_fixes_them():
    source = loader()
    assert source.window_indices(0, 62).tolist() != source.window_indices(62, 62).tolist()
    assert loader(seed=4).window_indices(0, 62).tolist() != source.window_indices(0, 62).tolist()
    assert loader(seed=None).window_indices(60, 4).tolist() == [60, 61, 0, 1]


def test_the_order_is_pinned():
    assert loader().window_indices(60, 6).tolist() == PINNED


@quick
@given(position=positions, n=st.integers(0, 200))
def test_the_order_is_a_function_of_each_position(position, n):
    source = loader()
    one_by_one = [int(source.window_indices(p, 1)[0]) for p in reversed(range(position, position + n))]
    assert loader().window_indices(position, n).tolist() == one_by_one[::-1]


@quick
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8), position=positions)
def test_changing_the_batch_size_mid_run_changes_no_sample(cuts, position):
    source, at, batches = loader(min_length=2), position, []
    for size in cuts:
        batches.append(source.global_batch(at, size))
        at += size
    assert is_the_batch(batches, loader(min_length=2).global_batch(position, sum(cuts)))


@quick
@given(
    position=positions,
    size=batch_sizes,
    dp_size=st.integers(1, 9),
    micro_batches=st.integers(1, 9),
    min_length=st.none() | st.integers(0, 16),
    data=st.data(),
)
def test_every_layout_sees_the_global_batch(position, size, dp_size, micro_batches, min_length, data):
    weights = st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=dp_size, max_size=dp_size).filter(any)
    shares = data.draw(st.none() | weights)
    whole = loader(min_length=min_length).global_batch(position, size)
    batches = []
    for rank in range(dp_size):
        mine = loader(min_length=min_length).micro_batches(position, size, rank, dp_size, micro_batches, shares)
        assert len(mine) == micro_batches
        assert all(b.tokens.shape == b.labels.shape == (len(b.samples), 16) for b in mine)
        lengths = [len(b.samples) for b in mine]
        assert max(lengths) - min(lengths) <= 1
        if shares is None:
            assert size // dp_size <= sum(lengths) <= -(-size // dp_size)
        elif shares[rank] == 0:
            assert sum(lengths) == 0
        batches += mine
    assert is_the_batch(batches, whole)
    assert sum(b.num_loss_tokens for b in batches) == whole.num_loss_tokens


def test_shares_split_the_batch_in_proportion():
    sizes = [sum(len(b.samples) for b in loader().micro_batches(7, 12, r, 3, 2, shares=[1, 2, 3])) for r in range(3)]
    assert sizes == [2, 4, 6]


def test_an_empty_batch_keeps_its_shape():
    empty = loader().micro_batches(0, 1, dp_rank=1, dp_size=2, micro_batches=2)
    assert [b.tokens.shape for b in empty] == [(0, 16), (0, 16)]
    assert [b.num_loss_tokens for b in empty] == [0, 0]


def test_uneven_lengths_are_a_function_of_the_sample_and_use_the_whole_range():
    batch = loader(min_length=2).global_batch(0, 500)
    kept = batch.labels != IGNORE_INDEX
    lengths = kept.sum(dim=1)
    assert torch.equal(kept, torch.arange(16) < lengths[:, None])  # a beginning of each sample, no holes
    assert set(lengths.tolist()) == set(range(2, 17))
    assert torch.equal(batch.tokens, loader().global_batch(0, 500).tokens)
    assert torch.equal(batch.labels[kept], loader().global_batch(0, 500).labels[kept])
    assert batch.num_loss_tokens == int(lengths.sum())
    # The mean length is uniform on 2..16: mean 9, standard deviation sqrt((15**2 - 1) / 12); six deviations of a mean.
    assert abs(lengths.double().mean() - 9) < 6 * ((15**2 - 1) / 12 / 500) ** 0.5


def test_a_minimum_of_the_full_length_ignores_nothing():
    assert same(loader(min_length=16).global_batch(3, 10), loader().global_batch(3, 10))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_tokens_of_any_integer_type_may_be_mapped_from_a_file(tmp_path, dtype):
    tokens = (np.arange(200) % 250).astype(dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=dtype, mode="r")
    expected = Loader((np.arange(200) % 250), 16, 0).global_batch(0, 12)
    assert same(Loader(mapped, 16, 0).global_batch(0, 12), expected)


def test_a_batch_may_be_written_to_without_changing_the_next():
    source = loader()
    before = source.global_batch(0, 4)
    source.global_batch(0, 4).labels.fill_(0)
    source.window_indices(0, 62)[:] = 0
    assert same(source.global_batch(0, 4), before)


def test_moving_a_batch_moves_all_of_it():
    moved = loader().global_batch(0, 2).to("meta")
    assert {t.device.type for t in (moved.tokens, moved.labels, moved.samples)} == {"meta"}


def test_evaluation_windows_are_fixed_and_spread_over_the_text():
    source = evaluation_loader(TOKENS, 16, num_samples=4)
    assert source.num_samples == 4
    assert source.global_batch(0, 4).tokens[:, 0].tolist() == [0, 15 * 16, 31 * 16, 46 * 16]
    assert same(source.global_batch(4, 4), evaluation_loader(TOKENS, 16, 4).global_batch(4, 4))
    assert source.window_indices(4, 4).tolist() == source.window_indices(0, 4).tolist()


def test_evaluation_uses_all_windows_when_fewer_than_asked():
    assert evaluation_loader(TOKENS, 16, num_samples=10**6).window_indices(0, 62).tolist() == list(range(62))


@pytest.mark.parametrize(
    "call, numbers",
    [
        (lambda: Loader(TOKENS[:16], 16, 0), ["16 tokens", "seq_len=16"]),
        (lambda: evaluation_loader(TOKENS[:16], 16, 4), ["16 tokens", "seq_len=16"]),
        (lambda: evaluation_loader(TOKENS, 16, 0), ["num_samples=0"]),
        (lambda: loader(seq_len=0), ["seq_len=0"]),
        (lambda: loader(min_length=17), ["min_length=17", "seq_len=16"]),
        (lambda: loader(windows=[]), ["windows"]),
        (lambda: loader().window_indices(-1, 2), ["position=-1"]),
        (lambda: loader().global_batch(0, -2), ["n=-2"]),
        (lambda: loader().micro_batches(0, 8, 2, 2, 1), ["rank=2", "world_size=2"]),
        (lambda: loader().micro_batches(0, 8, 0, 2, 0), ["micro_batches=0"]),
        (lambda: loader().micro_batches(0, 8, 0, 2, 1, shares=[1, 1, 1]), ["3 shares", "dp=2"]),
    ],
)
def test_impossible_input_is_refused_with_its_numbers(call, numbers):
    with pytest.raises(ValueError) as error:
        call()
    assert all(number in str(error.value) for number in numbers)


def test_data_imports_neither_comm_nor_a_process_group():
    program = (
        "import sys\n"
        "import torch, minidist\n"
        "before = set(sys.modules)\n"
        "import minidist.data.corpus, minidist.data.loader, minidist.data.partition\n"
        "print([m for m in set(sys.modules) - before if m.startswith(('minidist.', 'torch.distributed'))\n"
        "       and not m.startswith(('minidist.data', 'minidist.errors', 'minidist.hashing', 'minidist.labels'))])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
