"""Standard streams: closed ones are opened, and writes that fail can be dropped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.tools.standard_streams import drop_failed_writes, open_dropping_stream

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="writes to /dev/full, which Linux has")


def open_half_closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@needs_full
@pytest.mark.parametrize("open_fd", [open_half_closed_pipe, lambda: os.open(FULL, os.O_WRONLY)])
def test_a_write_that_fails_is_dropped(open_fd):
    fd = open_fd()
    stream = open_dropping_stream(fd)
    for _ in range(3):
        print("x" * 10_000, "\u2503", file=stream, flush=True)
    stream.close()
    os.close(fd)


def test_what_can_be_written_again_is_written(tmp_path):
    fd = open_half_closed_pipe()
    stream = open_dropping_stream(fd, "ascii")
    print("lost", file=stream)
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, fd)  # as when the disk has space again
    print("kept \u2503", file=stream)
    assert (tmp_path / "file").read_text() == "kept \\u2503\n"
    os.close(file)
    os.close(fd)


@needs_full
def test_streams_drop_failed_writes_inside_the_context_only(monkeypatch, capsys):
    with open(FULL, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with drop_failed_writes("stdout", "stderr"):
            print("lost", flush=True)
            print("of a test", file=sys.stderr)  # without a descriptor
        assert sys.stdout is full
        monkeypatch.undo()
    assert capsys.readouterr().err == "of a test\n"


@needs_full
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 1, "minidist: standard output cannot be written: No space left on device.\n"),
    ],
)
def test_a_command_ends_without_a_traceback_whatever_its_streams_are(redirection, code, message):
    command = f'"{sys.executable}" -m minidist --version {redirection}'
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (code, message)


def test_an_error_message_that_cannot_be_printed_keeps_the_exit_code():
    command = f'"{sys.executable}" -m minidist no-such-command 2>/dev/full'
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120).returncode == 2
