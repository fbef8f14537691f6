"""The structure of the repository: core and tools apart, arrows that point down, one way to the network, the style."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.core_lines import core_lines, core_modules

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minidist"
MODULES = sorted(PACKAGE.rglob("*.py"))
ENVIRONMENT = PACKAGE / "tools" / "launch"
CORE_LINES = 11_500

# From the bottom up; a module imports its own layer and those below it.
LAYERS = (
    {"errors", "hashing", "mesh", "parameters", "config", "config_file"},
    {"comm"},
    {
        "models",
        "data",
        "precision",
        "fault",
        "parallel",
        "zero",
        "recompute",
        "compile",
        "process_groups",
        "validation",
    },
    {"parallelize"},
    {"train"},
    {"tools", "__main__"},
)
# Folders that import less than their layer may: all that each of them imports of the package.
NARROW = {
    "models": {"hashing"},
    "data": {"errors"},
    "fault": {"errors", "parameters"},
    "precision": {"errors", "hashing", "parameters", "config"},
    "parallel": {"comm", "config", "errors", "mesh", "parameters", "validation"},
    "zero": {"comm", "config", "errors", "mesh", "parallel", "parameters", "precision"},
}
# The configuration contains that of the model, which has no other imports.
EXCEPTION = ("minidist.config", "minidist.models.config")


def name_of(path: Path) -> str:
    """`minidist.comm.group` of `minidist/comm/group.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Full names of the modules, and of the names in modules, that a file imports anywhere, also within functions.

    Imports for type annotations only, under `if TYPE_CHECKING:`, do not count: they never run.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def part_of(name: str) -> str | None:
    """The top-level module or folder of the package to which an imported name belongs, None for another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "minidist" and len(parts) > 1 else None


def layer_of(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def test_every_module_has_a_layer():
    parts = {part_of(name_of(path)) for path in MODULES} - {None}
    assert parts == set.union(*LAYERS)


@pytest.mark.parametrize("path", core_modules(), ids=name_of)
def test_the_core_imports_no_tool_and_arrows_point_down(path):
    """`minidist/__main__.py` is no part of the core: it is the entry of the command line."""
    name = name_of(path)
    own = part_of(name)
    for other in imported(path):
        part = part_of(other)
        if part is None or part not in set.union(*LAYERS) or other.startswith(EXCEPTION[1]) and name == EXCEPTION[0]:
            continue
        assert part != "tools", f"{name} imports {other}"
        if part != own:
            assert own is not None and layer_of(part) <= layer_of(own), f"{name} imports {other}, which is above it"
            assert part in NARROW.get(own, {part}), f"{name} imports {other}"


@pytest.mark.parametrize("path", core_modules(), ids=name_of)
def test_the_core_names_no_tool_in_a_string_that_code_uses(path):
    """Such as the argument of `import_module`. Docstrings may mention tools."""
    tree = ast.parse(path.read_text())
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert "minidist.tools" not in node.value, f"{name_of(path)}:{node.lineno}"


TRAINING = """
import sys
from dataclasses import replace
from pathlib import Path
from minidist.comm import World
from minidist.config import Config, DataConfig
from minidist.models.config import ModelConfig
from minidist.train.trainer import train
base = Config()
config = replace(
    base,
    model=ModelConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1),
    data=DataConfig(path=Path("text.txt"), seq_len=16),
    train=replace(base.train, steps=2, global_batch=4, eval_samples=8),
    folder=Path("run"),
)
summary = train(World.single(), config)
assert summary["step"] == 2 and summary["held_out_loss"] < 10, summary
print([name for name in sys.modules if name.startswith("minidist.tools")])
"""


def test_a_run_needs_the_core_alone(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    command = [sys.executable, "-c", TRAINING]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stdout + ran.stderr


def test_the_core_can_be_read_in_a_weekend():
    assert sum(core_lines().values()) <= CORE_LINES, core_lines()


def test_no_module_imports_itself_through_others():
    """Imports within functions count: they hide a cycle and do not undo it."""
    paths = {name_of(path): path for folder in ("minidist", "bench") for path in (ROOT / folder).rglob("*.py")}
    edges = {name: (imported(path) & paths.keys()) - {name} for name, path in paths.items()}
    # `from minidist.tools.shm import start` is an import of the module, not of the package around it.
    for name, others in edges.items():
        edges[name] = {other for other in others if not any(more.startswith(f"{other}.") for more in others)}
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules


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
