"""The rules of the house: who may import whom, one door to the network, and the style."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minidist"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room and the rooms it may import; `minidist` is the ground (mesh, spec, errors, config).
ALLOWED = {
    "models": {"hashing"},
    "data": {"ground"},
    "comm": {"ground"},
    "parallel": {"ground", "comm", "validation"},
    "precision": {"ground", "hashing"},
    "zero": {"ground", "comm", "parallel", "precision"},
    "fault": {"ground"},
    "train": {
        "ground",
        "comm",
        "data",
        "fault",
        "validation",
        "models",
        "parallel",
        "parallelize",
        "plan",
        "precision",
        "roles",
        "zero",
    },
    "notebook": {"ground", "comm", "pieces", "train"},
    "plan": {"ground", "comm", "data", "validation", "models", "parallel", "precision", "roles", "zero"},
    "parity": {"ground", "comm", "data", "fault", "validation", "models", "parallel", "parallelize", "train"},
}
GROUND = {"mesh", "spec", "errors", "config", "configfile", "progress"}
ENVIRONMENT = PACKAGE / "tools" / "launch"


def imported(path: Path) -> set[str]:
    """Full names of the modules a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def room(name: str) -> str | None:
    """The room of an imported name of the package, None for anything else."""
    parts = name.split(".")
    if parts[0] != "minidist" or len(parts) < 2:
        return None
    return "ground" if parts[1] in GROUND else parts[1]


@pytest.mark.parametrize("folder", ALLOWED)
def test_arrows_point_down_only(folder):
    files = [path for path in MODULES if path.is_relative_to(PACKAGE / folder)]
    assert files
    for path in files:
        rooms = {room(name) for name in imported(path)} - {None, folder}
        assert rooms <= ALLOWED[folder], f"{path.relative_to(ROOT)} imports {sorted(rooms - ALLOWED[folder])}"


def test_the_ground_knows_no_room_but_the_models_configuration():
    for name in GROUND:
        rooms = {room(n) for n in imported(PACKAGE / f"{name}.py") if n.startswith("minidist.")} - {"ground", None}
        assert rooms <= {"models"}, f"{name} imports {rooms}"


def test_what_models_import_knows_nothing_of_the_package():
    for name in ALLOWED["models"]:
        assert not any(n.startswith("minidist") for n in imported(PACKAGE / f"{name}.py"))


def test_only_comm_and_launch_talk_to_torch_distributed():
    allowed = (PACKAGE / "comm", PACKAGE / "tools")
    for path in MODULES:
        if not path.is_relative_to(allowed[0]) and not path.is_relative_to(allowed[1]):
            assert not any(name.startswith("torch.distributed") for name in imported(path)), path


def test_environment_variables_are_read_in_launch_only():
    for path in MODULES:
        # The backend's switch for nccl must work in programs that were not started by us.
        if not path.is_relative_to(ENVIRONMENT) and path.parts[-2:] != ("shm", "gpu.py"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_no_file_of_the_package_is_two_ideas_long():
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 300}
    long.pop("minidist/validation.py", None)  # all refusals are in one place
    assert not long


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_is_content(check):
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", *check, "--quiet", "."], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_nothing_names_a_path_of_one_machine():
    """Only files that git would carry count; a clone without git has no others."""
    suspicious = ("/" + "work/", "/" + "farm/")
    for path in [*MODULES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert not any(word in text for word in suspicious), path
