"""Checkpoints from strangers: an edited index with a right sha256 is refused by name, and nothing outside is read."""

import contextlib
import json
import math
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minidist.checkpoint.index import FileEntry, verify_checkpoint
from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.comm import World
from minidist.config import OptimConfig
from minidist.errors import DamagedError, UserError
from minidist.train.trainer import Trainer
from tests.helpers.checkpoint_cases import (
    full_shard,
    load_full_tensors,
    make_targets,
    rewrite_index,
    run_on_threads,
    save_sharded_rows,
)
from tests.helpers.small_run import small_config, train_small, with_changes, with_resume, write_text

FILE = "rank-00001.safetensors"
HUGE = 10**15


def rename_file(new):
    def change(body):
        body["files"][new] = body["files"].pop(FILE)

    return change


def set_at(value, *keys):
    def change(body):
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


def make_huge(body):
    """A shape and a box that fit each other, and a file of a size that fits both."""
    body["tensors"]["params/w"]["shape"][0] = HUGE
    body["partitions"][1][1][2] = 3 * HUGE
    body["files"][FILE]["bytes"] = (HUGE - 2) * 12 + 200


def swap_files(body):
    """Give the first file's name and checksum to the second, and the other way round; both files have one size."""
    for part in body["partitions"][1]:
        part[0] = 1 - part[0]


W, PART = ("tensors", "params/w"), ("partitions", 1, 1)  # rows 2 and 3, in the second file


def set_box(start, stop):
    """List rows 2 and 3 as a box, with these limits."""
    return set_at([1, start, stop], *PART)


def rename_tensor_to(name):
    def change(body):
        body["tensors"][name] = body["tensors"].pop("params/w")

    return change


EDITS = {
    "a file name that leads out": (rename_file("../outside.safetensors"), "no name of a file in this folder"),
    "a file below": (rename_file("below/outside.safetensors"), "no name of a file in this folder"),
    "an absolute path": (rename_file("/dev/zero"), "'/dev/zero' is no name of a file in this folder"),
    "the folder itself": (rename_file("."), "no name of a file in this folder"),
    "an empty file name": (rename_file(""), "no name of a file in this folder"),
    "a file that is not listed": (set_at(2, *PART, 0), "it refers to file '2' of 2"),
    "a file counted from the end": (set_at(-1, *PART, 0), "it refers to file '-1' of 2"),
    "a file that is text": (set_at("../x", *PART, 0), "it refers to file '../x' of 2"),
    "a partition that is not listed": (set_at(2, *W, "partition"), "it refers to partition '2' of 2"),
    "a partition of another tensor": (set_at(0, *W, "partition"), "2 of 12 elements are written"),
    "a file of a terabyte": (set_at(10**12, "files", FILE, "bytes"), "1,000,000,000,000 bytes, and its boxes hold 24"),
    "a size that is text": (set_at("24", "files", FILE, "bytes"), "the size of .* is '24'"),
    "a checksum that is none": (set_at("../x", "files", FILE, "checksum"), "not 64 hexadecimal digits"),
    "a step that is text": (set_at("2", "step"), "its step is '2'"),
    "a step that is true": (set_at(True, "step"), "its step is True"),
    "a negative step": (set_at(-2, "step"), "its step is -2"),
    "the step of another folder": (set_at(3, "step"), "its step is 3, and its folder is called step-00000002"),
    "a state that is a list": (set_at([1], "state"), r"its state is \[1\]"),
    "a huge box": (
        set_box([2, 0], [HUGE, 3]),
        r"has shape \[4, 3\], and a part of it goes from \[2, 0\] to \[1000000000000000, 3",
    ),
    "a box of fractions": (set_box([2.0, 0], [4, 3]), "a part of it goes from"),
    "a box of text": (set_box([2, 0], ["a", "b"]), "a part of it goes from"),
    "a negative box": (set_box([-2, 0], [4, 3]), "a part of it goes from"),
    "a box of more dimensions": (set_box([2, 0], [4, 3, 1]), "a part of it goes from"),
    "a box of other dimensions": (set_box([2], [4]), "a part of it goes from"),
    "overlapping boxes": (set_box([1, 0], [4, 3]), "params/w is written twice"),
    "a gap": (set_box([3, 0], [4, 3]), "9 of 12 elements are written"),
    "a box listed twice": (set_box([0, 0], [2, 3]), "params/w is written twice"),
    "a huge range": (set_at(HUGE, *PART, 2), r"a part of it goes from \[6\] to \[1000000000000000\]"),
    "a range of fractions": (set_at(6.0, *PART, 1), "a part of it goes from"),
    "a range that is text": (set_at("a", *PART, 1), "a part of it goes from"),
    "a negative range": (set_at(-6, *PART, 1), "a part of it goes from"),
    "a range that goes back": (set_at(12, *PART, 1), r"a part of it goes from \[12\] to \[12\]"),
    "a range from a number to a list": (set_at([4, 3], *PART, 2), "a part of it goes from"),
    "overlapping ranges": (set_at(5, *PART, 1), "params/w is written twice"),
    "a gap between ranges": (set_at(7, *PART, 1), "11 of 12 elements are written"),
    "a part of four": (set_at([1, 6, 12, 0], *PART), "not the index of a checkpoint"),
    "a name that clears the terminal": (
        rename_tensor_to("params/\x1b[2J"),
        r"'params/\\x1b\[2J' is no name of a tensor",
    ),
    "a name with a zero": (rename_tensor_to("params/w\0"), r"'params/w\\x00' is no name of a tensor"),
    "a million dimensions": (set_at([1] * 10**5, *W, "shape"), "has the shape"),
    "an unknown dtype": (set_at("float31", *W, "dtype"), "unknown dtype 'float31'"),
    "a dtype that is a list": (set_at([], *W, "dtype"), "not the index of a checkpoint"),
    "another dtype of the same size": (set_at("int32", *W, "dtype"), "its index as"),
    "a shape that is a number": (set_at(4, *W, "shape"), "not the index of a checkpoint"),
    "tensors as a list": (set_at([], "tensors"), "not the index of a checkpoint"),
    "parts of another file": (swap_files, "not the file that its index describes"),
}


def refusal(path, dtype=torch.float32):
    """The one message with which two ranks refuse to load the checkpoint; no tensor has changed. dtype: of `w`."""
    tensors = [{**make_targets(), "params/w": torch.full((4, 3), 77, dtype=dtype)} for _ in range(2)]
    outcomes = run_on_threads(
        2,
        lambda rank, exchange: load_checkpoint(
            path, [full_shard(*item) for item in tensors[rank].items()], exchange, rank
        ),
    )
    assert {type(outcome) for outcome in outcomes} == {DamagedError}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1 and len(str(outcomes[0])) < 800
    assert all((tensor == 77).all() for held in tensors for tensor in held.values())
    return str(outcomes[0])


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_index_is_refused_by_name_and_the_checkpoint_before_it_is_offered(tmp_path, kind):
    (tmp_path / "outside.safetensors").write_bytes((save_sharded_rows(tmp_path, 1) / FILE).read_bytes())
    path = save_sharded_rows(tmp_path, 2)
    change, said = EDITS[kind]
    rewrite_index(path, change)
    message = refusal(path, torch.int32 if "dtype" in kind else torch.float32)
    assert re.search(said, message), message
    assert f"Resume from {tmp_path / 'step-00000001'} instead" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "format": 1}', "it has the name 'format' twice"),
        ('{"format": 1, "sha256": NaN}', "it contains NaN"),
        ("[" * 100_000, "nested too deeply"),
        ('{"step": 1' + "0" * 5000 + "}", "not the index of a checkpoint"),
        ("\xff\xfe", "not the index of a checkpoint"),
    ],
    ids=["duplicated name", "NaN", "deep", "long number", "foreign bytes"],
)
def test_json_that_python_would_accept_or_choke_on_is_refused(tmp_path, text, said):
    path = save_sharded_rows(tmp_path, 1)
    (path / "checkpoint.json").write_text(text, encoding="latin-1")
    with pytest.raises(DamagedError, match=said):
        read_index(path)


@pytest.mark.parametrize("name", [FILE, "checkpoint.json"])
@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_devices_and_pipes_are_never_opened(tmp_path, name, kind):
    path = save_sharded_rows(tmp_path, 1)
    (path / name).unlink()
    if kind == "device":
        (path / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    assert f"{name} cannot be read: it is not a regular file" in refusal(path)


def test_a_file_whose_header_contradicts_the_index_is_refused_before_any_tensor_is_written(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    entries = load_file(path / FILE)
    save_file({key: tensor.view(-1).contiguous() for key, tensor in entries.items()}, path / FILE)
    entry = FileEntry.from_file(path / FILE)
    rewrite_index(path, set_at({"checksum": entry.checksum, "bytes": entry.num_bytes}, "files", FILE))
    assert "its index as ('F32', (2, 3))" in refusal(path)


def test_a_huge_tensor_is_refused_before_memory_or_a_hash_is_spent_on_it(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    rewrite_index(path, make_huge)
    with pytest.raises(UserError, match=r"params/w has shape \(1000000000000000, 3\) in the checkpoint, \(4, 3\) here"):
        load_full_tensors(path, make_targets())
    assert "it has 112 bytes, 12,000,000,000,000,176 were" in verify_checkpoint(path)[0]


def test_an_index_larger_than_any_is_not_read(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    os.truncate(path / "checkpoint.json", 1 << 40)  # a sparse file
    with pytest.raises(DamagedError, match="1,099,511,627,776 bytes, and an index has 1,073,741,824 at most"):
        read_index(path)


def test_an_intact_checkpoint_loads_from_a_folder_of_any_name(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    path.rename(tmp_path / "best")
    tensors = make_targets()
    load_full_tensors(tmp_path / "best", tensors)
    assert tensors["params/w"].tolist() == torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2).tolist()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with checkpoints of steps 2 and 3, and its configuration."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config(
        folder / "run", write_text(folder), train__steps=3, checkpoint__every=2, optim=OptimConfig(warmup_steps=2)
    )
    train_small(World.single(), config)
    return config


def edit_state(value, *keys):
    return set_at(value, "state", *keys)


def rename_tensor(old, new):
    def change(body):
        body["tensors"][new] = body["tensors"].pop(old)

    return change


def remove(*keys):
    def change(body):
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return change


def reinterpret_tensors(body):
    """Another dtype of the same size, so that only the files and the options contradict it."""
    for tensor in body["tensors"].values():
        tensor["dtype"] = "int32"


NORM = "model.norm.weight"
# What a stranger, who knows the format, may change in the index of a run: the change, and what the message says.
CONTRADICTIONS = {
    **{
        f"{field} {value!r}": (edit_state(value, field), field if field != "config" else "the configuration")
        for field, value in [
            *(("step", value) for value in ("3", -3, 2, 3.0, True)),
            *(("position", value) for value in ("36", -1, 1.5, 10**30)),
            *(("corpus", None), ("corpus_name", ["x"]), ("loss_scaler", "big")),
            ("loss_scaler", {"scale": "big", "good_steps": 1, "overflowed": []}),
            ("loss_scaler", {"scale": 1.0, "good_steps": 1, "overflowed": 3}),
            *(("replicas", value) for value in ("1", 0, 2, 1.5, None, 10**30)),
            *(("config", value) for value in (5, None, "[train", "[train]\nsteps = 'six'", "[train]\npace = 6")),
        ]
    },
    "no position": (remove("state", "position"), "position is 'missing'"),
    "no configuration": (remove("state", "config"), "the configuration in its state is missing"),
    "other dtypes": (reinterpret_tensors, "is int32 in the checkpoint, float32 here"),
    "a tensor without a kind": (rename_tensor(f"params/{NORM}", NORM), "is not in the checkpoint"),
    "a tensor of no parameter": (rename_tensor(f"params/{NORM}", "params/x"), "no place here for 1 of its tensors"),
    "an unknown state": (
        rename_tensor(f"optimizer.exp_avg/{NORM}", f"optimizer.x/{NORM}"),
        "step-00000003 is damaged: it has states of the optimizer for .*, but not exp_avg",
    ),
    "a tensor too few": (remove("tensors", f"optimizer.step/{NORM}"), "but not step"),
}


@pytest.fixture
def edited(run, tmp_path):
    """`edited(change)`: the folder of a copy of the run, whose newest checkpoint has a changed index."""

    def edit(change):
        shutil.copytree(run.folder, tmp_path / "run")
        rewrite_index(tmp_path / "run" / "checkpoints" / "step-00000003", change)
        return tmp_path / "run"

    return edit


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_an_edited_index_is_refused_by_name_and_an_automatic_resume_takes_the_checkpoint_before(run, edited, kind):
    change, said = CONTRADICTIONS[kind]
    folder = edited(change)
    named = with_resume(run, folder / "checkpoints" / "step-00000003", folder=folder.parent / "x", train__steps=4)
    with pytest.raises(DamagedError, match=said):
        Trainer(World.single(), named)
    with contextlib.closing(Trainer(World.single(), with_changes(run, folder=folder))) as trainer:
        assert trainer.resumed_from == folder / "checkpoints" / "step-00000002" and trainer.progress.step == 2
        assert re.search(said, trainer.start_notes[0])


def test_a_run_resumes_from_the_checkpoint_before_one_with_an_edited_state(run, edited):
    folder = edited(edit_state("3", "step"))
    train_small(World.single(), with_changes(run, folder=folder))
    starts = [row["start"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "start" in row]
    assert starts == [0, 2]


def test_a_state_with_nan_is_refused(edited):
    with pytest.raises(UserError, match="NaN"):
        read_index(edited(edit_state(math.nan, "step")) / "checkpoints" / "step-00000003")
