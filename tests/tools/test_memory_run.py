"""`--memory`: one step measured on every rank and drawn beside its estimate, without changing the run."""

import json
import sys

import matplotlib.image
import pytest
import torch

from minidist.errors import UserError
from minidist.tools.cli import main, parse_train_options
from minidist.tools.estimate.estimate import MEMORY_KINDS
from minidist.tools.memory import tracker
from minidist.tools.memory.storages import MemoryPeak
from tests.helpers.small_run import OPTIONS, Command, Stop, make_trainer, small_config, train_small, write_text

TIMES = ("step_time_s", "tokens_per_s", "memory", "time", "goodput", "useful_s")
KINDS = set(MEMORY_KINDS.values())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def measured(folder, text, **changes):
    return small_config(folder / "run", text, **{"memory__file": folder / "memory.png", "train__steps": 3, **changes})


def line_of(trainer):
    return next((one.summary_line for one in trainer.observers if isinstance(one, tracker.MemoryTracker)), None)


def run_and_report(world, config, stop_after=None):
    """Train; the last line about memory, and every number of the model."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, config)
    trainer.run(Stop(stop_after, trainer))
    return line_of(trainer), {name: t.clone() for name, t in trainer.engine.reducer.checkpoint_tensors().items()}


def numbers(config) -> dict:
    return json.loads(config.memory.file.with_suffix(".json").read_text())


def rows(config) -> list[dict]:
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


LAYOUTS = [
    (1, {}),
    (2, {"comm__gradients": "naive"}),
    (2, {"zero__stage": 3, "precision__policy": "bf16", "recompute": "block"}),
    (2, {"mesh__tp": 2, "parallel__sequence": True, "model__num_kv_heads": 2}),
    (2, {"mesh__cp": 2, "zero__stage": 1}),
    (2, {"mesh__pp": 2, "model__num_layers": 2, "recompute": "selective"}),
    (4, {"mesh__pp": 2, "model__num_layers": 2, "zero__stage": 2, "precision__policy": "fp16"}),
]


@pytest.mark.parametrize(
    ("size", "changes"),
    [pytest.param(*layout, marks=() if i in (0, 2, 5) else pytest.mark.exhaustive) for i, layout in enumerate(LAYOUTS)],
    ids=str,
)
def test_measuring_memory_does_not_change_the_run(ranks, tmp_path, text, size, changes):
    plain = small_config(tmp_path / "plain", text, train__steps=3, **changes)
    config = measured(tmp_path, text, **changes)
    before, after = ranks(run_and_report, size, plain), ranks(run_and_report, size, config)
    for (_, values), (_, same) in zip(before, after, strict=True):
        assert values.keys() == same.keys() and all(torch.equal(values[name], same[name]) for name in values)
    assert rows(plain) == rows(config)
    found = numbers(config)
    assert found["step"] == 2 and [each["rank"] for each in found["ranks"]] == list(range(size))
    for each in found["ranks"]:
        seen, message = each["measured"], each["estimated"]
        assert seen["total"] == sum(seen["breakdown"].values()) > 0 and set(seen["breakdown"]) <= KINDS == set(
            message["breakdown"]
        )
        assert message["total"] == sum(message["breakdown"].values()) and seen["allocator_peak"] is None
        for kind in ("parameters", "masters", "states"):
            assert seen["peak_by_kind"].get(kind, 0) == message["peak_by_kind"][kind] == message["breakdown"][kind]
    assert matplotlib.image.imread(config.memory.file).std() > 0.05


def test_the_table_is_of_the_rank_with_the_highest_peak(ranks, tmp_path, text):
    config = measured(tmp_path, text, mesh__pp=2, model__num_layers=2, train__micro_batches=2)
    (line, _), _ = ranks(run_and_report, 2, config)
    found = numbers(config)["ranks"]
    most = max(found, key=lambda each: each["measured"]["total"])
    head, names, *body = line.splitlines()
    assert head == f"peak memory of rank {most['rank']}, the highest, in step 2, on cpu"
    assert names.split() == ["measured", "estimated"]
    assert body[-1] == f"picture: {config.memory.file}; all ranks in numbers: {config.memory.file.with_suffix('.json')}"
    (together,) = [row for row in body if row.startswith("total")]
    totals = most["measured"]["total"], most["estimated"]["total"]
    assert together.split(maxsplit=1)[1].split("  ")[0].strip() == tracker.format_bytes(totals[0])
    assert any(row.startswith("activations ") for row in body) and "allocator" not in line
    if sys.platform == "linux":
        assert any(row.startswith("shared memory") for row in body)


def test_the_allocators_figure_stands_beside_on_cuda():
    peak = MemoryPeak(100, {"parameters": 60, "buffers": 40}, {"parameters": 60, "buffers": 40}, 0, allocator_peak=128)
    (cost,) = tracker.estimate(small_config(None, None), 1).ranks
    message = tracker.format_memory_table(2, "cuda", [peak], [cost])
    assert message.splitlines()[-1].split() == ["allocator's", "peak", "128", "B"]
    assert tracker.draw_memory_chart(2, "cuda", [peak], [cost], "svg").count(b"<!-- allocator's peak -->") == 1


def test_memory_of_another_step_together_with_a_trace(ranks, tmp_path, text):
    config = measured(tmp_path, text, memory__step=3, trace__file=tmp_path / "trace.json", trace__first=2)
    (line, _), _ = ranks(run_and_report, 2, config)
    assert "in step 3, on cpu" in line and numbers(config)["step"] == 3
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["steps"] == [2, 3]


def test_a_resumed_run_measures_its_own_second_step(ranks, tmp_path, text):
    ranks(train_small, 1, small_config(tmp_path / "run", text, train__steps=3))

    def going_on(name, steps, **changes):
        again = {"checkpoint__resume": tmp_path / "run", "memory__file": tmp_path / name, "train__steps": steps}
        return small_config(tmp_path / "run", text, **again, **changes)

    config = going_on("memory.png", 6)
    ((line, _),) = ranks(run_and_report, 1, config)
    assert numbers(config)["step"] == 5 and "step 5" in line
    assert "memory.png" not in (tmp_path / "run" / "config.toml").read_text()
    ((line, _),) = ranks(run_and_report, 1, going_on("other.png", 7, memory__step=2))
    assert line == "no memory measured: the run resumed after step 6, past --memory.step 2"


def test_a_run_that_ends_before_says_so(ranks, tmp_path, text):
    (line, _), _ = ranks(run_and_report, 2, measured(tmp_path, text), 1)
    assert line == "no memory measured: the run ended before step 2" and not (tmp_path / "memory.png").exists()


def profiled(world, config, when):
    """Another profiler on rank 1, from the start or from within the measured step."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, config)
    other = torch.autograd.profiler.profile()
    if world.rank == 1 and when == "before":
        other.__enter__()
    if world.rank == 1 and when == "meanwhile":
        step = trainer.engine.step

        def meanwhile(number, *args, **options):
            if number == 1:
                other.__enter__()
            return step(number, *args, **options)

        trainer.engine.step = meanwhile
    done = trainer.run(Stop())["step"]
    if world.rank == 1:
        other.__exit__(None, None, None)
    return done, line_of(trainer)


@pytest.mark.parametrize(("when", "why"), [("before", "is recording"), ("meanwhile", "replaced this one")])
def test_a_second_profiler_is_reported_of_and_the_run_goes_on(ranks, tmp_path, text, when, why):
    config = measured(tmp_path, text)
    (steps, line), _ = ranks(profiled, 2, config, when)
    assert steps == 3 and sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert line == (
        "no memory measured: rank 1 could not start torch's profiler in step 2 "
        f"(another torch profiler {why}). Stop the other profiler, or give another --memory.step."
    )


@pytest.mark.exhaustive
def test_memory_is_measured_under_torchrun(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minidist")
    more = ("--train.steps", "2", "--folder", "run", "--memory", "m.svg", "--data.path", write_text(tmp_path))
    with Command("train", *OPTIONS, *more, module=torchrun, folder=tmp_path) as command:
        assert command.end() == 0, command.output
    assert command.output.count("picture: m.svg; all ranks in numbers: m.json") == 1
    assert len(json.loads((tmp_path / "m.json").read_text())["ranks"]) == 2 and (tmp_path / "m.svg").stat().st_size


def test_unwritable_paths_and_missing_steps_are_refused(tmp_path, capsys):
    (tmp_path / "there.json").write_text("")
    (tmp_path / "there.png").write_text("")
    picture = str(tmp_path / "m.png")
    for words, message in (
        ([str(tmp_path / "m.txt")], "must be a picture: give a name that ends in .png, .svg, .pdf"),
        ([str(tmp_path / "there.png")], "there.png exists already: remove it, or give the picture another name"),
        ([str(tmp_path / "there.svg")], f"{tmp_path / 'there.json'}, where its numbers go, exists already"),
        ([str(tmp_path / "no" / "m.png")], "cannot be written: No such file or directory"),
        ([picture, "--trace", str(tmp_path / "m.json")], "and so does --trace: give one of them another name"),
        (
            [picture, "--memory.step", "601"],
            "memory.step is 601, but the run ends at step 600: no step would be measured",
        ),
        ([picture, "--memory.step", "0"], "memory.step is 0; it must be 1 or more"),
    ):
        assert main(["train", "--device", "cpu", "--memory", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def refuse(world, config):
    with pytest.raises(UserError) as error:
        make_trainer(world, config)
    return str(error.value)


def test_a_path_that_rank_0_cannot_write_is_refused_on_all_ranks(ranks, tmp_path, text):
    first, second = ranks(refuse, 2, measured(tmp_path, text, memory__file=tmp_path / "no" / "m.png"))
    assert first == second and "rank 0: --memory" in first


def test_the_short_option_is_the_long_one():
    for words in (["--memory", "a.png"], ["--memory=a.png"], ["--memory.file", "a.png"]):
        config, _ = parse_train_options([*words, "--memory.step", "4"])
        assert (str(config.memory.file), config.memory.step) == ("a.png", 4)


@pytest.mark.parametrize("size", [1, 8, 16, 64])
def test_the_picture_shows_every_rank_or_one_of_each_stage(size, monkeypatch):
    drawn = []
    monkeypatch.setattr(tracker, "draw_memory_bars", lambda axes, bars: drawn.append(bars))
    changes = {"mesh__pp": 4 if size > 1 else 1, "model__num_layers": 4, "train__micro_batches": 4}
    config = small_config(None, None, train__global_batch=64, **changes)
    costs = tracker.estimate(config, size).ranks
    peaks = [MemoryPeak(cost.peak_memory_bytes + cost.rank, cost.peak_breakdown, {}, 0) for cost in costs]
    picture = tracker.draw_memory_chart(2, "cpu", peaks, costs, "svg").decode()
    assert len(drawn[0]["measured"]) == len(drawn[0]["estimated"]) == (size if size <= 16 else 4)
    assert ("the one with the highest peak of each stage" in picture) == (size > 16)
