"""The command line: one message per error, exit codes, and no process left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.checkpoint.index import verify_checkpoint
from minidist.comm import World
from minidist.config import Config, to_toml
from minidist.mesh import Mesh
from minidist.tools.cli import main, parse_train_options, run_to_exit_code
from minidist.tools.config_warnings import find_warnings, validate_options
from minidist.tools.launch import start
from tests.helpers.processes import DEFAULT_CPU_BACKEND, wait_until
from tests.helpers.small_run import (
    OPTIONS,
    Command,
    descendants,
    small_config,
    train_small,
    wait_until_gone,
    write_text,
)

TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")


def refused(capsys, *arguments) -> str:
    """The one message with which `minidist ARGUMENTS` fails, before any rank is started."""
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    text = (output.out + output.err).strip()
    assert code == 2 and text and "Traceback" not in text
    assert text.count("minidist: ") == 1 and len(text.splitlines()) == 1
    return text


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder with checkpoints of steps 3 and 6, the last of the run; and its text."""
    folder = tmp_path_factory.mktemp("finished")
    text = write_text(folder)
    train_small(World.single(), small_config(folder / "run", text))
    return folder / "run", text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean train"),
        (
            ["xyz"],
            "there is no command 'xyz'; possible: train, sample, parity, consistency, chaos, estimate, simulate, doc",
        ),
        (["train", "--ranks", "0"], "--ranks is 0; at least 1 rank is needed"),
        (["train", "--ranks", "3", "--mesh.dp", "2"], "needs 2 ranks, the world has 3: set --mesh.dp 3"),
        (["train", "--ranks", "1", "--mesh.dp", "2"], r'needs 2 ranks, the world has 1: start with .* "--ranks 2"'),
        (["train", "--ranks", "2", "--train.micro-batches", "20"], "dp=2 ranks x 20 micro-batches = 40 "),
        (["train", "--train.steps", "0"], "train.steps is 0; it must be 1 or more"),
        (["train", "--train.steps", "x"], "--train.steps is 'x'; it must be a whole number"),
        (["train", "--ranks", "two"], "--ranks is 'two'; it must be a whole number"),
        (["train", "--optim.lr"], "--optim.lr needs a value: a number"),
        (["train", "--optim.lr", "--compile"], "--optim.lr needs a value: a number"),
        (["train", "--optim.betas", "0.9"], "--optim.betas has 1 value; it needs 2"),
        (["train", "--optim.kind", "adam"], "--optim.kind is 'adam'; did you mean adamw[?] possible: adamw, sgd, muon"),
        (["train", "--compile=yes"], "--compile takes no value, but 'yes' was given: .* --no-compile to turn it off"),
        (["train", "--zero.prefetch", "false"], "but 'false' was given: .* --zero.no-prefetch to turn it off"),
        (["train", "text.txt"], "'text.txt' belongs to no option; options begin with --"),
        (["train", "--data.pth", "x"], "there is no option --data.pth; did you mean --data.path[?]"),
        (["train", "--batch-size", "4"], "there is no option --batch-size; did you mean --train.global-batch[?]"),
        (["train", "--steps", "4"], "there is no option --steps; did you mean --train.steps or --trace.steps"),
        (["train", "--lr", "4"], "there is no option --lr; did you mean --optim.lr[?]"),
        (["train", "--train.stpes", "4"], "there is no option --train.stpes; did you mean --train.steps[?]"),
        (["train", "--no-zero.prefetch"], "no option --no-zero.prefetch; did you mean --zero.no-prefetch[?] minidist"),
        (["train", "--rank", "2"], "there is no option --rank; did you mean --ranks[?]"),
        (["train", "--zero", "1"], "there is no option --zero; did you mean --zero.stage[?]"),
        (["train", "--bf16"], "there is no option --bf16; did you mean --precision.policy bf16[?]"),
        (
            ["train", "--mesh", "2"],
            "mesh is a section, with the options --mesh.pp, --mesh.dp, --mesh.cp, --mesh.tp[.] ",
        ),
        (["train", "--qqq", "4"], r"there is no option --qqq\. minidist train --help lists all"),
        (["simulate", "--microbatches", "4"], "there is no option --microbatches; did you mean --micro-batches[?]"),
        (["sample"], "--checkpoint PATH is missing. A checkpoint"),
        (["train", "--memory.step", "3"], "memory.step 3 has no effect: no memory is measured: give --memory FILE"),
        (["train", "--data.path", "no.txt"], r"--data.path no.txt does not exist"),
        (["train", "--checkpoint.resume", "nowhere"], "no checkpoint to resume from: nowhere does not exist"),
        (["train", "--config", "no.toml"], "--config no.toml cannot be read: No such file"),
        (["sample", "--checkpoint", "nowhere"], "nowhere does not exist"),
        (["sample", "--checkpoint", ".", "--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["sample", "--checkpoint", ".", "--prompt", ""], "--prompt is empty"),
    ],
)
def test_invalid_options_are_refused_in_one_message(place, capsys, arguments, message):
    assert re.search(message, refused(capsys, *arguments))
    assert not list(place.iterdir()), "a refused run leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --data.path t.txt --data.source stdlib", "data.source stdlib has no effect: data.path is t.txt"),
        ("estimate --data.path t.txt --data.source=stdlib", "data.source stdlib has no effect"),
        ("train --data.path t.txt --config t.toml", "data.source stdlib has no effect"),
        ("estimate --consistency.outer_lr 0.7", "consistency.outer-lr 0.7 has no effect"),
        ("estimate --zero.offload", "the 2 ranks run on the CPU .* or give --device cuda to estimate a run on GPUs"),
        ("estimate --parameters 10 --zero.offload", "give --device cuda to estimate"),
        ("consistency --data.path t.txt --data.source synthetic", "data.source synthetic has no effect"),
        ("consistency --modes local --consistency.outer-lr 0.7", "--consistency.outer-lr has no effect"),
        ("consistency --modes local --bound 2", "--bound 2 has no effect"),
        ("consistency --consistency.mode synchronous", "give --modes instead"),
    ],
)
def test_an_option_given_at_its_default_must_have_an_effect_too(place, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(start, "count_gpus", lambda: 0)
    Path("t.txt").write_text("to be or not to be\n" * 1000)
    Path("t.toml").write_text("[data]\nsource = 'stdlib'")
    assert re.search(message, refused(capsys, *arguments.split()))


def test_only_what_the_user_writes_counts_as_given(place):
    Path("own.toml").write_text("device = 'cpu'\n[train]\nlog_every = 10")
    Path("record.toml").write_text(to_toml(Config()))  # of a run: it lists every option
    words = "--train.micro_batches=1 --zero.no-offload --data.source stdlib"
    own, _ = parse_train_options(["--config", "own.toml", *words.split()], default_options=("--optim.kind", "sgd"))
    options = {"device", "train.log-every", "train.micro-batches", "zero.offload", "data.source"}
    assert own.given == {"config", *options}
    validate_options(own, 2)  # nothing is asked for by a switch that is off
    record, _ = parse_train_options(["--config", "record.toml", "--data.path", "t.txt", "--zero.prefetch"])
    assert validate_options(record, 2).dp == 2
    assert find_warnings(record, Mesh(dp=2)) == ["zero.prefetch true has no effect: zero.stage is 0, not 3."]
    assert record == parse_train_options(["--data.path", "t.txt"])[0] and "given" not in to_toml(record)


def test_texts_that_cannot_be_learned_from_are_refused(place, capsys):
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    assert "--data.path empty.txt is empty (0 bytes)" in refused(capsys, "train", "--data.path", "empty.txt")
    assert "9 bytes" in refused(capsys, "train", "--data.path", "short.txt")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU here")
def test_missing_devices_and_backends_are_refused(place, capsys):
    assert "--device cuda: torch sees 0 GPUs here" in refused(capsys, "train", "--device", "cuda")
    assert "--device cuda:3: torch sees 0 GPUs here" in refused(capsys, "train", "--device", "cuda:3")
    message = refused(capsys, "train", "--zero.offload", "--ranks", "2")
    assert "zero.offload true has no effect" in message and "the 2 ranks run on the CPU (--device auto)" in message
    message = refused(capsys, "train", "--comm.backend", "nccl", "--ranks", "2")
    assert "nccl needs a GPU of its own for each rank; here are 2 ranks on cpu and 0 GPUs" in message


def test_a_run_folder_already_in_use_is_refused(place, capsys, finished):
    folder, text = finished
    Path("notes").mkdir()
    Path("notes/a.txt").touch()
    train = ("train", *OPTIONS, "--data.path", text, "--folder")
    assert "--folder notes is not empty (it holds a.txt)" in refused(capsys, *train, "notes")
    message = refused(capsys, *train, folder)
    assert "holds a run with other options (" in message and "optim.kind sgd there, adamw here" in message
    assert f"go on with that run under these options with --checkpoint.resume {folder}" in message
    assert "notes/a.txt is a file" in refused(capsys, *train, "notes/a.txt")
    message = refused(capsys, *train, "notes/a.txt/run")
    assert "notes/a.txt/run cannot be made: Not a directory. Give --folder a place where you may write" in message


@pytest.fixture
def mount(tmp_path):
    """`mount("ro")`: a new folder on a file system that is read-only or, with "size=4k", has no free page."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def make(option):
        ended = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "minidist-test", folder], capture_output=True)
        if ended.returncode:
            pytest.skip(f"mount is not allowed here: {ended.stderr.decode().strip()}")
        if option != "ro":
            (folder / "filler").write_bytes(bytes(4096))
        return folder

    yield make
    subprocess.run(["umount", folder], capture_output=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system of Linux")
@pytest.mark.parametrize(
    ("option", "reason"), [("ro", "Read-only file system"), ("size=4k", "No space left on device")]
)
def test_a_file_system_that_cannot_be_written_is_refused(place, capsys, monkeypatch, mount, option, reason):
    monkeypatch.setattr(start, "RankServer", None)  # no rank is started
    folder = mount(option) if option == "ro" else mount(option) / "run"
    message = refused(capsys, "train", *OPTIONS, "--data.path", write_text(place), "--folder", folder)
    assert f"the run folder {folder} cannot be written: {reason}. Give --folder a place where you may" in message
    assert sorted(os.listdir(place / "mounted")) == ([] if option == "ro" else ["filler"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_parity_deletes_its_folder_when_a_signal_ends_it_even_if_its_shell_ignores_sigint(place, number, code):
    temporary = place / "temporary"
    temporary.mkdir()
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    # torch makes the folder of inductor's cache when it is imported, if that is not over before the signal.
    environ = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
    command = Command("parity", "--ranks", "1", folder=place, environ=environ, prefix=ignoring)
    with command:
        # A file in it: a signal that comes while Python creates a temporary folder leaves it behind.
        assert wait_until(lambda: list(temporary.glob("minidist-parity-*/*")))
        os.kill(command.process.pid, number)
        ended = command.end()
    # Python ends itself by SIGINT if the interrupt came while C++ code ran Python (an import of torch does); a shell
    # reports 130 for that too.
    assert (128 - ended if ended < 0 else ended) == code
    assert not list(temporary.iterdir()) and "Traceback" not in command.output, command.output


@pytest.fixture
def set_hangup():
    """`set_hangup(action)`: what SIGHUP does in this test, whatever it does in the shell that runs the tests."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda action: signal.signal(signal.SIGHUP, action)
    signal.signal(signal.SIGHUP, before)


def hang_up() -> int:
    signal.raise_signal(signal.SIGHUP)
    return 0


def test_a_terminal_that_closes_ends_a_command_with_an_exception_unless_under_nohup(set_hangup):
    set_hangup(signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended:
        run_to_exit_code(hang_up)
    assert ended.value.code == 128 + signal.SIGHUP
    set_hangup(signal.SIG_IGN)
    assert run_to_exit_code(hang_up) == 0


class JobThatWaits:
    """A job during which this process receives SIGHUP."""

    def __init__(self):
        self.signals = []
        self.stop = self.signals.append

    def wait(self):
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize(("action", "sent"), [(signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])])
def test_a_terminal_that_closes_asks_the_ranks_to_save_unless_under_nohup(set_hangup, tmp_path, action, sent):
    set_hangup(action)
    job = JobThatWaits()
    start._wait(job, tmp_path)
    assert job.signals == sent and signal.getsignal(signal.SIGHUP) == action


def test_checkpoints_that_cannot_be_resumed_are_refused(place, capsys, finished):
    folder, text = finished
    resume = ("train", "--checkpoint.resume", folder)
    assert "is at step 6, and the run ends at step 6: nothing is left to do" in refused(capsys, *resume)
    more = (*resume, "--train.steps", "9")
    other = refused(capsys, *more, "--data.path", write_text(place, seed=1))
    assert "was trained on another corpus (text-0.txt:" in other and "than this run has (text-1.txt:" in other
    assert "with --train.seed 1234, this run has 5" in refused(capsys, *more, "--train.seed", "5")
    assert "with --data.seq-len 16, this run has 8" in refused(capsys, *more, "--data.seq-len", "8")
    earlier = folder / "checkpoints" / "step-00000003"
    message = refused(capsys, "train", "--checkpoint.resume", earlier)
    assert f"{earlier} is at step 3, and its run has gone on to step 6: resume the latest with" in message
    Path("toml").write_text(f"[checkpoint]\nresume = '{folder}'")
    assert "is at step 6, and the run ends at step 6" in refused(capsys, "train", "--config", "toml")


def test_empty_foreign_and_damaged_folders_are_refused(place, capsys, finished):
    Path("empty").mkdir()
    assert "empty is empty" in refused(capsys, "train", "--checkpoint.resume", "empty")
    Path("foreign").mkdir()
    Path("foreign/notes.txt").touch()
    assert "holds no complete one, only notes.txt" in refused(capsys, "train", "--checkpoint.resume", "foreign")
    train_small(World.single(), small_config(Path("hurt"), finished[1]))
    capsys.readouterr()
    index = Path("hurt/checkpoints/step-00000006/checkpoint.json")
    text = index.read_text()
    assert '"step":6' in text
    index.write_text(text.replace('"step":6', '"step":7'))
    message = refused(capsys, "train", "--checkpoint.resume", "hurt")
    assert "is damaged: its sha256 is" in message and "hurt/checkpoints/step-00000003 instead" in message


@pytest.mark.parametrize("arguments", [["estimate", "--json"], ["simulate"], ["train", "--help"], ["--help"]])
def test_a_closed_pipe_ends_the_command_without_a_message(place, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "minidist", *arguments]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=place, timeout=60)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_ranks_can_be_set_in_the_config_file(place, capsys, monkeypatch):
    Path("run.toml").write_text("ranks = 3\n[train]\nsteps = 9")
    config, ranks = parse_train_options(["--config", "run.toml"])
    assert (config.train.steps, ranks) == (9, 3)
    assert parse_train_options(["--config", "run.toml", "--ranks", "2"])[1] == 2
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert parse_train_options(["--config", "run.toml"])[1] is None  # torchrun decides
    monkeypatch.delenv("RANK")
    Path("run.toml").write_text("ranks = 'two'")
    assert "run.toml: ranks is 'two', a text; it must be a whole number" in refused(
        capsys, "train", "--config", "run.toml"
    )


def test_options_are_parsed():
    words = "--train.micro_batches=2 --optim.betas 0.5 0.6 --optim.clip-norm none --zero.stage 2 --zero.no-prefetch"
    config, _ = parse_train_options([*words.split(), "--compile"])
    assert (config.train.micro_batches, config.optim.betas, config.optim.clip_norm) == (2, (0.5, 0.6), None)
    assert (config.zero.stage, config.zero.prefetch, config.compile) == (2, False, True)
    assert parse_train_options(["--trace", "a.json"])[0].trace.file == Path("a.json")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "command", ["train", "sample", "parity", "consistency", "chaos", "estimate", "simulate", "doctor"]
)
def test_help_is_as_wide_as_the_terminal_at_most(capsys, monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    output = capsys.readouterr().out
    assert not ended.value.code and f"usage: minidist {command}" in output
    assert max(map(len, output.splitlines())) <= columns and "None" not in output


def test_help_and_refusals_do_not_wait_for_torch(place):
    ask = """
import sys
from minidist.tools.cli import main, parse_train_options
for arguments in ("--help", "trian", "train --ranks 0", "train --data.path no", "consistency --h 7", "train --help"):
    try:
        main(arguments.split())
    except SystemExit:
        pass
print("torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=place, timeout=240)
    assert ended.stdout.splitlines()[-1] == "False", ended.stderr
    assert "Ctrl-C, SIGTERM or SIGHUP" in " ".join(ended.stdout.split()) and "--data.seq-len" in ended.stdout


def test_the_command_trains_and_then_samples(place, capsys):
    text = write_text(place)
    arguments = (*OPTIONS, "--data.path", text, "--ranks", "2", "--train.steps", "4", "--train.log-every", "2")
    with Command("train", *arguments, "--folder", "run", folder=place) as command:
        assert command.end() == 0, command.output
    lines = command.output.splitlines()
    assert lines[0].startswith(f"2 ranks on cpu over {DEFAULT_CPU_BACKEND}, mesh pp=1 x dp=2 x cp=1 x tp=1; model of")
    steps = [line for line in lines if re.match(r"step +\d+  loss [\d.]+  grad norm [\d.]+  lr", line)]
    assert [int(line.split()[1]) for line in steps] == [1, 2, 4]
    assert re.fullmatch(
        r"held-out loss [\d.]+ nats per token \(unigram [\d.]+, bigram [\d.]+\): not below the bigram model", lines[-2]
    )
    assert sorted(os.listdir("run")) == ["checkpoints", "config.toml", "loss.png", "metrics.jsonl"]
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"step", "tokens", "loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "comm_bytes", "memory"} <= set(
        rows[1]
    )
    assert main(["sample", "--checkpoint", "run", "--tokens", "20", "--prompt", "that "]) == 0
    first = capsys.readouterr().out
    main(["sample", "--checkpoint", "run", "--tokens", "20", "--prompt", "that "])
    assert first.startswith("that ") and first == capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_killed_rank_is_reported_and_the_last_checkpoint_is_complete(place):
    arguments = (*OPTIONS, "--data.path", write_text(place), "--ranks", "2", "--train.steps", "100000")
    with Command("train", *arguments, "--checkpoint.every", "5", "--folder", "run", folder=place) as command:
        command.read_until("checkpoint: run/checkpoints")
        below = descendants(command.process.pid)
        ranks = [pid for pid, parent in below.items() if parent != command.process.pid]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        assert command.end() == 1, command.output
        assert wait_until_gone(below)
    output = command.output[command.output.index("minidist: ") :]
    assert re.match(r"minidist: rank [01] died: killed by SIGKILL\nmeanwhile\n  rank [01]: ", output)
    last = re.search(r"The last checkpoint is (\S+): go on with --checkpoint.resume run$", output.strip())
    assert not verify_checkpoint(place / last[1])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_killed_command_leaves_no_process(place):
    arguments = (*OPTIONS, "--data.path", write_text(place), "--ranks", "2", "--train.steps", "100000")
    with Command("train", *arguments, folder=place) as command:
        command.read_until("step      1 ")
        below = descendants(command.process.pid)
        assert len(below) == 3
        command.process.kill()
        assert wait_until_gone(below)


def test_under_torchrun_rank_0_alone_prints(place):
    restarts = ("--max-restarts", "1")  # the ranks fail again after it
    train = ("--standalone", *restarts, "-m", "minidist", "train", *OPTIONS, "--data.path", write_text(place))
    with Command(*train, "--mesh.dp", "3", module=TORCHRUN, folder=place) as command:
        assert command.end() == 1
    message, table = command.output.split("ChildFailedError", 1)
    assert message.count("minidist: the mesh") == 1, command.output
    # torchrun repeats the message in its table of failed ranks, where a person looks first.
    causes = re.findall("traceback : (.*)", table)
    assert [cause.startswith("minidist: the mesh") for cause in causes].count(True) == 1, table
    # The other rank has the same error, or torchrun has ended it before it got there.
    ends = ("minidist: the mesh", "the same error as rank 0", "Signal 15 (SIGTERM)")
    assert all(cause.startswith(ends) for cause in causes), table
    assert "needs 3 ranks, the world has 2: set --mesh.dp 2" in command.output
    # The traceback there is torchrun's own.
    assert "exitcode  : 2" in command.output and "UserError" not in command.output


def test_under_torchrun_port_0_is_refused(place):
    train = ("-m", "minidist", "train", *OPTIONS, "--data.path", write_text(place))
    with Command("--master-port", "0", *train, module=TORCHRUN, folder=place) as command:
        assert command.end() == 1
    message = command.output.partition("ChildFailedError")[0]
    assert message.count("minidist: MASTER_PORT is 0, so the 2 ranks cannot find each other") == 1


def test_a_port_in_use_is_refused(place, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with Command("train", *OPTIONS, "--data.path", write_text(place), folder=place) as command:
            assert command.end() == 2
    assert command.output.startswith(f"minidist: port {port} of 127.0.0.1, the rendezvous of the 2 ranks, is in use")
    assert len(command.output.splitlines()) == 1


def test_ranks_under_torchrun_are_refused(place, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert "--ranks 4 under torchrun" in refused(capsys, "train", "--ranks", "4")
    finally:
        signal.signal(signal.SIGTERM, before)
