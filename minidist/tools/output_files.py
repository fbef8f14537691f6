"""Output files of tools: atomic writes, and checks of the files that `--trace` and `--memory` name. Needs no torch."""

import contextlib
import os
from pathlib import Path

from minidist.config import Config
from minidist.errors import UserError

PICTURES = (".png", ".svg", ".pdf")


def check_output_files(config: Config) -> None:
    """Raise UserError if a file that `--trace` or `--memory` would write exists already or cannot be written."""
    check_trace_file(config)
    check_memory_files(config)


def check_trace_file(config: Config) -> None:
    """Raise UserError if the file that `--trace` names exists already or cannot be written."""
    if (file := config.trace.file) is not None:
        _check_new_file("trace", file, file)


def check_memory_files(config: Config) -> None:
    """Raise UserError if the picture that `--memory` names, or the JSON file beside it, exists or cannot be written."""
    if (picture := config.memory.file) is None:
        return
    if picture.suffix.lower() not in PICTURES:
        raise UserError(f"--memory {picture} must be a picture: give a name that ends in {', '.join(PICTURES)}.")
    for file in (picture, picture.with_suffix(".json")):
        _check_new_file("memory", picture, file)
    if config.trace.file == picture.with_suffix(".json"):
        raise UserError(
            f"--memory {picture} writes its numbers to {config.trace.file}, and so does --trace: give one of them "
            "another name."
        )


def _check_new_file(option: str, given: Path, path: Path) -> None:
    """Raise UserError if `path` exists or cannot be written. option, given: the option that names it, its value."""
    if path.exists():
        what = given if path == given else f"{given}: {path}, where its numbers go,"
        whose = {"trace": "the trace", "memory": "the picture"}[option]
        raise UserError(f"--{option} {what} exists already: remove it, or give {whose} another name.")
    try:
        _partial_path(path).write_bytes(b"")
        _partial_path(path).unlink()
    except OSError as error:
        raise UserError(
            f"--{option} {given} cannot be written: {error.strerror}. "
            "Give a file in a folder that exists and where you may write."
        ) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is complete or absent, even if the machine crashes. Raises OSError.

    Creates the parent folder. An existing file is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _partial_path(path: Path) -> Path:
    """Return the temporary name of a file being written: hidden, and another one in every process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
