"""`python -m exercises certificate`: what it proves, trains and writes; nothing is left behind when it ends."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from exercises import certificate, certificate_page, torchrun_process
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.certificate_proofs import choose_cover
from exercises.learner_pieces import read_piece
from exercises.stubs import generate_answer
from exercises.work import Work
from minidist.errors import RunError
from tests.helpers.browser import CHROMIUM
from tests.helpers.processes import is_alive, needs_proc, wait_until
from tests.helpers.small_run import Command, descendants
from tests.helpers.warm_python import warm_python

CATALOGUE = Catalogue()
PASSED = ("token_count", "replica_digest", "resharding_load")
CHANGED = "block_partition"  # right, and not checked since it was edited
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def _forked_torchrun():
    """torchrun and its ranks are forked from a warm process, as other programs that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        names = {**vars(subprocess), "Popen": warm_python.popen}
        patch.setattr(torchrun_process, "subprocess", types.SimpleNamespace(**names))
        yield


def solve(folder: Path, *names: str, **answers: str) -> Work:
    """A learner's folder in which these exercises have passed. answers: other texts than the solution, by name."""
    work = Work(folder)
    work.update(CATALOGUE)
    for name in names:
        exercise = CATALOGUE[name]
        work.file(exercise).write_text(answers.get(name) or exercise.solution.read_text())
        work.record(exercise, True, exercise.points, work.file(exercise).read_bytes())
    return work


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A certificate on two ranks, of a few passed exercises: (the learner's folder, JSON, page)."""
    work = solve(tmp_path_factory.mktemp("learner") / "work", *PASSED)
    work.file(CATALOGUE[CHANGED]).write_text(generate_answer(CATALOGUE[CHANGED], "right_loop"))
    page = work.folder / "certificate.html"
    assert certificate.make_certificate(CATALOGUE, work, 2, page, steps=STEPS)
    return work, json.loads(page.with_suffix(".json").read_text()), page


def test_the_certificate_says_what_was_proven_and_measured(made):
    work, found, _ = made
    assert found["verdict"] == {"passed": True, "reasons": []}
    assert {each["exercise"] for each in found["functions"]} == {*PASSED, CHANGED}
    assert [layout["name"] for layout in found["layouts"]] == ["hybrid", "resumed"]
    for layout in found["layouts"]:
        assert layout["ok"] and layout["dtype"] == layout["reference_dtype"] == "float64"
        assert 0 < layout["differences"]["grad"] < layout["tolerance"]["grad"] == 1e-10
    assert "Repaired from the others" in found["repair"]["note"]
    training = found["training"]
    assert training["steps"] == len(training["yours"]["losses"]) == STEPS
    assert training["largest_loss_difference"] < 1e-5
    assert training["yours"]["held_out_loss"] == pytest.approx(training["fast"]["held_out_loss"], abs=1e-4)
    for rank in training["yours"]["ranks"]:
        assert rank["modelled_bytes_per_step"] > 4 * 164_416  # the gradients, in float32
        assert rank["peak_memory"] > 4 * 4 * 164_416  # parameters, gradients and two moments


def test_every_function_of_the_learner_is_called_and_counted_by_rank(made):
    _, found, _ = made
    calls = {each["exercise"]: each for each in found["functions"]}
    assert calls["token_count"]["training_calls_by_rank"] == [STEPS, STEPS]
    assert calls["replica_digest"]["training_calls"] == 0 < calls["replica_digest"]["proof_calls"]
    assert calls["resharding_load"]["training_calls"] == 0 < calls["resharding_load"]["proof_calls"]


def test_a_changed_file_is_checked_again_and_recorded(made):
    work, found, _ = made
    assert work.entry(CATALOGUE[CHANGED])["attempts"] == 1 and work.is_unchanged_since_pass(CATALOGUE[CHANGED])


def numbers_in(value) -> set[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        return set().union(*map(numbers_in, value.values() if isinstance(value, dict) else value))
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


SHOWN = re.compile(r'<data value="([^"]+)">([^<]+)</data>')


def test_the_pages_numbers_are_those_of_the_json(made):
    _, found, page = made
    shown, known = SHOWN.findall(page.read_text()), numbers_in(found)
    assert len(shown) > 50 and {float(value) for value, _ in shown} <= known
    for value, text in shown:
        number = float(value) if re.search(r"[.en]", value) else int(value)
        assert text in {write(number) for write in certificate_page._FORMATS.values() if _can_write(write, number)}
    assert page.read_text() == certificate_page.render_page(found, "certificate.json")


def _can_write(write, number) -> bool:
    try:
        write(number)
    except (TypeError, ValueError):
        return False
    return True


def test_the_page_shows_the_figures_of_another_run(made):
    """Nothing on it is fixed: another number in the JSON is another number on the page."""
    _, found, _ = made
    other = json.loads(json.dumps(found))
    other["training"]["comparison"]["peak_memory"]["yours"] = 123_456_789
    other["layouts"][0]["differences"]["grad"] = 4.4e-13
    page = certificate_page.render_page(other, "certificate.json")
    assert "123.457 MB" in page and "4.4e-13" in page


def test_the_page_needs_nothing_else_and_labels_its_figures(made):
    _, found, page = made
    text = page.read_text()
    assert not re.search(r"https?:|\bsrc=|url\(|<link|<script|@import", text)
    assert "prefers-color-scheme: dark" in text and "@page { size: A4" in text
    assert set(found["labels"].values()) == {"observed", "counted", "modelled", "computed"}
    for how in found["labels"].values():
        assert f"<i>{how}</i>" in text


def test_the_code_that_the_page_names_is_there():
    files = re.findall(r"minidist/[\w/]+\.py", " ".join(where for *_, where in certificate_page._FIGURES))
    assert files and all((ROOT / file).is_file() for file in files)


@pytest.mark.skipif(CHROMIUM is None, reason="printing needs Chromium, which is not here")
def test_the_page_is_one_a4_page_and_follows_the_readers_colors(made, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        backgrounds = []
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            page.goto(made[2].as_uri())
            backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        document = page.pdf(prefer_css_page_size=True, print_background=True)
        browser.close()
    assert backgrounds[0] == "rgb(255, 255, 255)" != backgrounds[1]
    assert len(re.findall(rb"/Type\s*/Page[^s]", document)) == 1
    [size] = set(re.findall(rb"/MediaBox\s*\[([^\]]+)\]", document))
    assert [round(float(number)) for number in size.split()[2:]] == [595, 842]  # A4, in points


def test_a_function_that_is_wrong_in_one_layout_is_shown_as_different(tmp_path, capsys):
    """The hybrid layout does not call it, and is equal; the layout that does differs. The model is not trained."""
    wrong = generate_answer(CATALOGUE["ring_all_reduce"], "wrong_sent_in_half")
    work = solve(tmp_path / "work", "token_count", "ring_all_reduce", ring_all_reduce=wrong)
    page = tmp_path / "page.html"
    assert main(["--work", str(work.folder), "certificate", "--ranks", "2", "--out", str(page)]) == 1
    found = json.loads(page.with_suffix(".json").read_text())
    assert [(each["name"], each["ok"]) for each in found["layouts"]] == [("hybrid", True), ("ring", False)]
    assert not found["verdict"]["passed"] and found["training"] is None
    assert found["verdict"]["reasons"][0].startswith("ring (dp=2 all-reduce=ring")
    assert ">not passed<" in page.read_text() and ">differs<" in page.read_text()
    assert ">passed<" not in page.read_text()
    printed = capsys.readouterr().out
    assert "DIFFERS: step 0 grad" in printed and "\nnot passed:\nring " in printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full, which Linux has")
def test_output_that_cannot_be_written_does_not_end_a_certificate(tmp_path, monkeypatch):
    def fail(*_):
        raise RunError("the proofs begin")

    work = solve(tmp_path / "work", "token_count")
    monkeypatch.setattr(certificate, "_prove", fail)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(RunError, match="the proofs begin"):
            certificate.make_certificate(CATALOGUE, work, 2, tmp_path / "page.html")


@pytest.mark.parametrize(
    ("words", "passed", "message"),
    [
        ([], (), "there is nothing to certify"),
        ([], ("strided_partition",), "there is nothing to certify"),  # which no training run calls
        (["--ranks", "3"], ("token_count",), "--ranks 3: the certificate's layout has 2, 4, 8 ranks"),
        (["--out", "page.pdf"], ("token_count",), "whose name ends in .html"),
        (["--out", "no/such/page.html"], ("token_count",), "Make it first"),
    ],
)
def test_an_impossible_certificate_is_one_message(tmp_path, capsys, words, passed, message):
    work = solve(tmp_path / "work", *passed)
    assert main(["--work", str(work.folder), "certificate", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("exercises: ") == 1 and not out
    assert not list(work.folder.glob("certificate.*"))


@needs_proc
@pytest.mark.parametrize("line", ["layouts with your functions", "training under torchrun", "step      1"])
def test_ctrl_c_leaves_nothing(tmp_path, line):
    work = solve(tmp_path / "work", "token_count")
    (temporary := tmp_path / "temporary").mkdir()
    words = ("--work", work.folder, "certificate", "--ranks", 2)
    with Command(*words, module=("exercises",), folder=ROOT, environ={"TMPDIR": str(temporary)}) as command:
        command.read_until(line)
        assert wait_until(lambda: descendants(command.process.pid))  # the rank server, or torchrun, which starts ranks
        started = descendants(command.process.pid)
        command.process.send_signal(signal.SIGINT)
        while command.process.poll() is None:
            started |= descendants(command.process.pid)
        assert command.end() == 130, command.output  # and no process has its stdout any more
    assert wait_until(lambda: not any(map(is_alive, started)))
    assert not [path for path in temporary.iterdir() if path.name.startswith("minidist")]
    assert not list(work.folder.glob("certificate.*"))
    assert "Traceback" not in command.output


def test_a_signal_that_arrives_while_a_process_starts_is_delivered_afterwards():
    seen = []
    with pytest.raises(KeyboardInterrupt), torchrun_process.hold_signals():
        signal.raise_signal(signal.SIGINT)
        seen.append("the process has started")
    assert seen and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_proc
def test_a_run_that_misses_its_deadline_is_ended_with_a_line_for_each_rank(tmp_path):
    (tmp_path / "stuck.py").write_text("import threading\nthreading.Event().wait()\n")
    (folder := tmp_path / "run").mkdir()
    started = []

    def popen(*args, **options):
        started.append(warm_python.popen(*args, **options))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as error:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.setattr(torchrun_process, "_GRACE_S", 0.0)
        patch.setattr(torchrun_process.subprocess, "Popen", popen)
        torchrun_process.run_under_torchrun("stuck", str(folder), 2, folder, deadline_s=1.0)
    assert str(error.value).splitlines() == [
        "the run under torchrun had not ended after 1 s:",
        "rank 0: had not started",
        "rank 1: had not started",
    ]
    [torchrun] = started
    assert torchrun.poll() is not None and not is_alive(torchrun.pid)


def test_a_rank_is_described_by_its_steps_and_the_line_of_its_main_thread(tmp_path):
    """Of all threads in the stack, the one that runs the program; of its lines, the innermost outside of libraries."""
    mine = tmp_path / "mine.py"
    mine.write_text("import faulthandler\ndef hang(file):\n    faulthandler.dump_traceback(file)\n")
    program = tmp_path / "certificate_run.py"
    program.write_text("import mine\nmine.hang(file)\n")
    release = threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "stack-1").open("w") as stack:
        patch.syspath_prepend(tmp_path)
        runpy.run_path(str(program), {"file": stack})
    release.set()
    other.join()
    torchrun_process.note_step(tmp_path, 1, 7)
    assert torchrun_process._describe_place(tmp_path, 1) == f"7 steps done, at {mine}:3"
    assert torchrun_process._describe_place(tmp_path, 0) == "had not started"


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_named_with_its_line(tmp_path):
    """Rank 1 waits for ever in the learner's function, in step 2, and rank 0 for it."""
    from exercises.certificate_run import measure_training

    body = "    import threading, os\n    threading.Event().wait() if os.environ['RANK'] == '1' else None\n    count = "
    text = CATALOGUE["token_count"].solution.read_text().replace("    count = ", body, 1)
    work = solve(tmp_path / "work", "token_count", token_count=text)
    line = 1 + next(i for i, each in enumerate(text.splitlines()) if "Event().wait()" in each)
    options = [*certificate._MODEL, "--train.steps", "6", "--comm.hang-limit-s", "1000"]
    with pytest.raises(RunError, match="had not ended after 120 s") as error:
        measure_training(
            ["--engine", "simple", "--mesh.dp", "2", *options],
            [read_piece(CATALOGUE["token_count"], work)],
            2,
            tmp_path / "run",
            120.0,  # a busy machine starts slowly
        )
    assert f"rank 1: before the first step, at {work.file(CATALOGUE['token_count'])}:{line}" in str(error.value)


def test_a_cover_calls_everything_and_takes_the_layouts_that_call_most():
    layouts = {"one": ("a",), "two": ("a", "b"), "three": ("c",), "repair": ("d", "a", "b", "c")}
    assert choose_cover({"a", "b", "c", "d"}, layouts) == ["two", "three"]
    assert choose_cover({"d"}, layouts) == choose_cover((), layouts) == []


@pytest.mark.exhaustive
@pytest.mark.deadline(900)
def test_all_solutions_together_on_eight_ranks(tmp_path):
    names = [each.name for each in CATALOGUE.values() if each.kind == "piece"]
    work, page = solve(tmp_path / "work", *names), tmp_path / "page.html"
    assert certificate.make_certificate(CATALOGUE, work, 8, page)
    found = json.loads(page.with_suffix(".json").read_text())
    assert found["layouts"][0]["layout"].startswith("pp=2 dp=2 tp=2 1f1b sequence")
    assert found["num_functions"] == found["num_functions_of_course"] == len(found["functions"])
    assert all(each["training_calls"] or each["proof_calls"] for each in found["functions"])
    operations = found["training"]["comparison"]["operations"]
    assert operations["fast"] < operations["yours"]
    assert {float(value) for value, _ in SHOWN.findall(page.read_text())} <= numbers_in(found)
    shutil.rmtree(work.folder)
