"""Invalid configurations are refused with their numbers; a configuration round-trips through its TOML file."""

import dataclasses
import re
from pathlib import Path

import pytest

from minidist.config import Config, option_fields, to_toml
from minidist.config_text import parse_config_text
from minidist.errors import UserError
from minidist.tools.config_file import read_config_file, suggest_in_toml
from minidist.validation import validate
from tests.helpers.small_run import with_changes


@pytest.mark.parametrize("ranks", [1, 2, 4, 32])
def test_the_default_configuration_runs_on_any_number_of_ranks(ranks):
    assert validate(Config(), ranks).dp == ranks


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (3, {"mesh__dp": 2}, r"pp=1 x dp=2 x cp=1 x tp=1 needs 2 ranks, the world has 3: set --mesh.dp 3"),
        (1, {"mesh__dp": 4}, r"needs 4 ranks, the world has 1: start with torchrun or \"--ranks 4\""),
        (3, {"mesh__tp": 2}, r"pp=1 x dp=1 x cp=1 x tp=2 needs 2 ranks, the world has 3: .* \"--ranks 2\""),
        (6, {"mesh__tp": 2, "mesh__dp": 2}, r"dp=2 x cp=1 x tp=2 needs 4 ranks, the world has 6: set --mesh.dp 3, or"),
        (3, {"mesh__tp": 2}, r"the world has 3: set --mesh.tp 1, or start"),
        (2, {"mesh__tp": 4, "mesh__pp": 2}, r"tp=4 needs 8 ranks, the world has 2: set --mesh.tp 1, or start"),
        (6, {"mesh__tp": 4, "mesh__dp": 3}, r"tp=4 needs 12 ranks, the world has 6: set --mesh.tp 2, or start"),
        (3, {"mesh__tp": 2, "mesh__pp": 2}, r"tp=2 needs 4 ranks, the world has 3: start with torchrun"),
        (2, {"mesh__dp": 0}, r"mesh.dp is 0; a mesh axis is at least 1"),
        (
            2,
            {"train__global_batch": 5, "train__micro_batches": 3},
            r"of 5 samples .* dp=2 ranks x 3 micro-batches = 6 \(world size 2, mesh pp=1 x dp=2 x cp=1 x tp=1\): "
            r"give --train.global-batch 6 or more, or --train.micro-batches 2 or fewer",
        ),
        (
            9,
            {"train__global_batch": 8},
            r"of 8 samples is too small for dp=9 .* --train.global-batch 9 or more, or --mesh.dp 8 or",
        ),
        (1, {"train__steps": 0}, r"train.steps is 0; it must be 1 or more: change --train.steps"),
        (1, {"checkpoint__keep": 0}, r"checkpoint.keep is 0; it must be 1 or more"),
        (1, {"optim__lr": float("nan")}, r"optim.lr is nan; it must be 0 or more"),
        (1, {"optim__lr": float("inf")}, r"optim.lr is inf"),
        (1, {"optim__min_lr_fraction": 2.0}, r"optim.min-lr-fraction is 2.0; it must be from 0 to 1"),
        (1, {"optim__clip_norm": 0.0}, r"optim.clip-norm is 0.0; it must be above 0"),
        (1, {"optim__betas": (0.9, 1.0)}, r"optim.betas is \(0.9, 1.0\); both must be 0 or more and below 1"),
        (1, {"data__seq_len": 2048}, r"data.seq-len is 2048, but the model accepts at most 1024 tokens"),
        (1, {"data__min_length": 200}, r"data.min-length is 200; it must be from 1 to data.seq-len \(128\)"),
        (
            2,
            {"data__shares": (1.0,)},
            r"data.shares is 1.0 \(1 number\); it needs one number per",
        ),
        (2, {"data__weights": (1.0, -1.0)}, r"data.weights is 1.0 -1.0 .* none of them below 0"),
        (2, {"data__weights": (0.0, 0.0)}, r"at least one above 0"),
        (2, {"data__shares": (1.0, float("inf"))}, r"data.shares is 1.0 inf"),
        (1, {"model__num_heads": 3}, r"model.num_heads=3 does not divide hidden_size=128; possible: 1, 2"),
        (1, {"device": "tpu"}, r"device is 'tpu'; possible: auto, cpu, cuda \(one GPU per rank\), cuda:0"),
    ],
)
def test_invalid_configurations_are_refused_with_their_numbers(ranks, changes, message):
    with pytest.raises(UserError, match=message):
        validate(with_changes(Config(), **changes), ranks)


def test_clip_norm_none_is_valid():
    validate(with_changes(Config(), optim__clip_norm=None), 1)


@pytest.mark.parametrize("path", ["plain.txt", 'a "quoted" \\ path', "tab\tand\nline", "del\x7f", "höhe"])
def test_a_configuration_round_trips_through_toml(path):
    config = with_changes(
        Config(), data__path=Path(path), data__shares=(0.25, 1e-9), optim__clip_norm=None, model__tie_embeddings=False
    )
    assert parse_config_text(to_toml(config), "x") == config
    assert parse_config_text(to_toml(Config()), "x") == Config()


def test_every_field_is_written():
    text = to_toml(Config())
    for section in option_fields(Config):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            assert re.search(rf"^{section.name} = ", text, re.MULTILINE)
            continue
        part = text.split(f"[{section.name}]\n")[1].split("\n[")[0]
        assert [line.split(" = ")[0] for line in part.split("\n") if line] == [
            f.name for f in dataclasses.fields(value)
        ]


def test_a_file_changes_only_what_it_names():
    base = with_changes(Config(), train__seed=7)
    assert parse_config_text("[train]\nsteps = 9\n[data]\nshares = [1, 2]", "f", base) == with_changes(
        base, train__steps=9, data__shares=(1.0, 2.0)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstpes = 3", "f.toml: there is no option train.stpes; did you mean train.steps?"),
        ("[tarin]\nsteps = 3", "f.toml: there is no option tarin; did you mean train?"),
        ("[train]\nzzz = 3", "possible: train.steps, train.global_batch"),
        ("[train]\nsteps = '3'", "f.toml: train.steps is '3', a text; it must be a whole number"),
        ("[train]\nsteps = true", "train.steps is True, true or false; it must be a whole number"),
        ("[train]\nsteps = 2024-01-01", "a date; it must be a whole number"),
        ("[optim]\nlr = []", r"optim.lr is \[\], a list; it must be a number"),
        ("[optim]\nbetas = [0.9]", "optim.betas has 1 value; it must have 2"),
        ("[optim]\nkind = 'adam'", "optim.kind is 'adam'; did you mean adamw\\? possible: adamw, sgd"),
        ("[data]\npath = 3", "data.path is 3, a whole number; it must be a text"),
        ("[data]\nshares = 3", "data.shares is 3, a whole number; it must be a list of numbers"),
        ("train = 3", r"train is a section, not a value: write \[train\] and its fields below$"),
        ("zero = 1", r"zero is a section, .* fields below; did you mean zero.stage\?"),
        ("rank = 2", r"there is no option rank; did you mean ranks\?"),
        ("zzz = 2", r"there is no option zzz; possible: ranks, model, data"),
        ("lr = 1.0", r"there is no option lr; did you mean optim.lr\?"),
        ("bf16 = true", r'there is no option bf16; did you mean precision.policy = "bf16"\?'),
        ("[train]\nbatch_size = 4", r"there is no option train.batch_size; did you mean train.global_batch\?"),
        ("[optim]\nwarmup = 4", r"there is no option optim.warmup; did you mean optim.warmup_steps\?"),
        ("[train", "f.toml is not a TOML file"),
    ],
)
def test_a_wrong_file_is_reported_by_key_and_type(text, message):
    with pytest.raises(UserError, match=message):
        parse_config_text(text, "f.toml", suggest_option=suggest_in_toml)


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    with pytest.raises(UserError, match="--config .*no.toml cannot be read: No such file"):
        read_config_file(tmp_path / "no.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="bytes.toml is not a TOML file: it is not text"):
        read_config_file(tmp_path / "bytes.toml")
