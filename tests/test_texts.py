"""Texts about the programs: options that messages and documents name exist, and quoted messages are those printed."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from bench.contender_report import title
from bench.workload import WORKLOADS
from exercises.__main__ import COMMANDS as EXERCISES_COMMANDS
from minidist.errors import format_count
from minidist.tools import cli
from minidist.tools.chaos.command import ChaosOptions
from minidist.tools.consistency.comparison_options import ConsistencyOptions
from minidist.tools.console.sample_command import SampleOptions
from minidist.tools.doctor import DoctorOptions
from minidist.tools.options import option_names
from minidist.tools.parity.command import ParityOptions
from minidist.tools.simulate.command import SimulateOptions

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = [path for folder in ("minidist", "exercises", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "chapters/faq.md"]
# These also name options of Megatron-LM and Slurm; an option with a section is ours.
OF_OTHERS_TOO = [
    *sorted(ROOT.glob("chapters/*/*.ipynb")),
    *sorted(ROOT.glob("chapters/*.md")),
    *sorted(ROOT.glob("launch/*")),
]
COMMAND_OPTIONS = (
    *(cli.TrainOptions, cli._EstimateOptions, SampleOptions, ParityOptions, ConsistencyOptions, ChaosOptions),
    *(SimulateOptions, DoctorOptions, *(kind for kind, _ in EXERCISES_COMMANDS.values())),
)
OTHER_OPTIONS = {
    *("trace", "memory", "version", "help"),  # minidist, for short
    *("install", "quiet", "timeout", "stop", "reset"),  # magics of the notebooks
    *("signal", "gpus-per-task"),  # Slurm
    *("editable", "extra-index-url"),  # pip
    *("name", "section.name", "section.field", "no-name"),  # any option
}
# "*" stands for what an f-string fills in. `--model options` are those of a section.
OPTION = re.compile(r"(?<![\w.*-])--([a-z][\w*-]*(?:\.[\w*-]+)*)(?![\w*-]|`? options)")
MIN_LETTERS = 8  # that a quoted line has in common with the text of a message


@functools.cache
def texts(path: Path) -> list[str]:
    """All string literals of a Python file, with "*" for the values in f-strings."""
    tree, found, parts = ast.parse(path.read_text()), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return found


def argparse_options(path: Path) -> Iterator[str]:
    """The options that a file declares with `add("--name", ...)`, as the benchmarks do."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            first = node.args[0].value
            if isinstance(first, str) and re.fullmatch(r"--[a-z][a-z-]*", first):
                yield first[2:]


@functools.cache
def existing_options() -> set[str]:
    names = set(OTHER_OPTIONS).union(*map(option_names, COMMAND_OPTIONS))
    for path in PROGRAMS:
        if "argparse" in path.read_text() or path.parent.name == "bench":
            names.update(argparse_options(path))
    return names | {one.lstrip("-") for action in get_args_parser()._actions for one in action.option_strings}


def unknown_options(text: str) -> set[str]:
    found = {name.replace("_", "-").rstrip("-.") for name in OPTION.findall(text)}
    return {name for name in found if "*" not in name} - existing_options()


@pytest.mark.parametrize("folder", ["minidist", "exercises", "bench"])
def test_every_option_in_a_message_exists(folder):
    wrong = {}
    for path in PROGRAMS:
        # The sandbox starts bubblewrap; tasks and notebooks of the course are tested with it.
        if path.is_relative_to(ROOT / folder) and path.name != "sandbox.py" and "--" in path.read_text():
            for text in texts(path):
                if unknown := unknown_options(text):
                    wrong[str(path.relative_to(ROOT))] = unknown
    assert not wrong


def test_every_option_in_a_document_exists():
    wrong = {path.name: unknown_options(path.read_text()) for path in DOCUMENTS}
    for path in OF_OTHERS_TOO:
        wrong[path.name] = {name for name in unknown_options(path.read_text()) if "." in name}
    assert not {name: unknown for name, unknown in wrong.items() if unknown}


def test_extras_that_texts_advise_are_those_of_a_checkout():
    """The package is in no index: only pip install -e '.[EXTRA]' finds it."""
    advice = "\n".join(
        [*(text for path in PROGRAMS for text in texts(path)), *(path.read_text() for path in DOCUMENTS)]
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"course", "peers", "remote"} <= set(re.findall(r"pip install -e '\.\[(\w+)\]'", advice)) <= set(extras)
    assert not re.findall(r"minidist\[\w+\]", advice)


def blocks(path: Path) -> list[list[str]]:
    """The lines of each block of a Markdown file that is not in a programming language."""
    return [text.splitlines() for text in re.findall(r"^```\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)]


def quoted_refusals() -> list[tuple[str, str]]:
    """The commands of the documents that are followed by a message on one or several lines, and the message."""
    found = []
    for lines in (lines for path in DOCUMENTS for lines in blocks(path)):
        if lines[0].startswith("$ minidist ") and len(lines) > 1 and lines[1].startswith("minidist: "):
            found.append((lines[0], " ".join(lines[1:])))
    return found


@pytest.mark.parametrize(("command", "message"), quoted_refusals())
def test_a_quoted_refusal_is_the_one_printed(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()[2:]) == 2
    assert capsys.readouterr().err.strip() == message


def quoted_output() -> list[str]:
    """The lines that the documents show without the command that prints them."""
    command = re.compile(r"\$|#|minidist |torchrun |python |make |export |curl |git |  --")
    found = []
    for lines in (lines for path in DOCUMENTS for lines in blocks(path)):
        if not any(command.match(line) for line in lines):
            found += lines
    return found


@functools.cache
def message_patterns() -> list[re.Pattern]:
    """A pattern for the beginning of each message of the package that is an f-string."""
    found = {text for path in PROGRAMS if path.is_relative_to(ROOT / "minidist") for text in texts(path)}
    long = [text for text in found if "*" in text and len(re.sub(r"[^a-z]", "", text)) >= MIN_LETTERS]
    return [re.compile(re.escape(text).replace(r"\*", ".*?")) for text in long]


@pytest.mark.parametrize("line", quoted_output())
def test_quoted_output_is_text_of_the_package(line):
    assert any(pattern.match(line) for pattern in message_patterns())


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, ("step",), "0 steps"), (1, ("step",), "1 step"), (20_000, ("batch", "batches"), "20000 batches")],
)
def test_numbers_agree_with_their_nouns(number, noun, text):
    assert format_count(number, *noun) == text


def test_a_benchmark_of_one_round_and_one_step_says_so():
    assert "1 round with turns of 1 step\n" in title(WORKLOADS["tiny"], 1, 1, "gloo")
    assert "2 rounds with turns of 3 steps\n" in title(WORKLOADS["tiny"], 2, 3, "gloo")
