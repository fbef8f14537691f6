"""The structure of the repository: no import of a tool by the core or of a higher layer, no cycle, one style."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.core_lines import core_lines, core_modules, simple_trainer_lines

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minidist"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAUNCH = PACKAGE / "tools" / "launch"
# All files together, the longest file, the longest function. Wanted are 2,200 lines in all.
SIMPLE_TRAINER_LINES, SIMPLE_TRAINER_FILE_LINES, SIMPLE_TRAINER_FUNCTION_LINES = 2_840, 250, 50

# From the bottom up; a module imports its own layer and lower ones.
LAYERS = (
    {"errors", "hashing", "labels", "mesh", "parameters", "tensor_bytes", "config", "config_text", "learning_rate"},
    {"comm"},
    {
        "models",
        "data",
        "precision",
        "checkpoint",
        "fault",
        "consistency",
        "parallel",
        "zero",
        "recompute",
        "compile",
        "process_groups",
        "validation",
    },
    {"simple"},
    {"parallelize"},
    {"train"},
    {"tools", "__main__"},
)
# Folders that may import less of the package than their layer allows: exactly these parts.
ALLOWED_PARTS = {
    "models": {"hashing", "labels"},
    "data": {"errors", "hashing", "labels"},
    "checkpoint": {"errors", "fault", "hashing", "parameters", "tensor_bytes"},
    "fault": {"checkpoint", "comm", "errors", "hashing", "parameters"},
    "consistency": {"comm", "config", "errors", "hashing", "parallel", "parameters"},
    "precision": {"comm", "config", "errors", "hashing", "parameters"},
    "parallel": {"comm", "config", "errors", "labels", "mesh", "models", "parameters", "validation"},
    "zero": {"comm", "config", "errors", "mesh", "parallel", "parameters", "precision"},
    "simple": {"comm", "config", "data", "errors", "learning_rate", "mesh", "models", "parameters"},
}
# The configuration contains that of the model, which has no other imports.
EXCEPTION = ("minidist.config", "minidist.models.config")


def module_name(path: Path) -> str:
    """The module's name: `minidist.comm.group` for `minidist/comm/group.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path) -> set[str]:
    """Full names of all modules, and of all names in modules, that a file imports, also within functions.

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


def top_level_part(name: str) -> str | None:
    """The top-level module or folder of the package to which an imported name belongs, None for another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "minidist" and len(parts) > 1 else None


def layer_of(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def test_every_module_has_a_layer():
    parts = {top_level_part(module_name(path)) for path in MODULES} - {None}
    assert parts == set.union(*LAYERS)


@pytest.mark.parametrize("path", core_modules(), ids=module_name)
def test_core_modules_import_no_tool_and_no_higher_layer(path):
    """`minidist/__main__.py`, the entry of the command line, does not belong to the core."""
    name = module_name(path)
    own = top_level_part(name)
    for other in imported_names(path):
        part = top_level_part(other)
        if part is None or part not in set.union(*LAYERS) or other.startswith(EXCEPTION[1]) and name == EXCEPTION[0]:
            continue
        assert part != "tools", f"{name} imports {other}"
        assert part != "simple" or own == "simple", f"{name} imports {other}: the fast trainer stands without it"
        if part != own:
            assert own is not None and layer_of(part) <= layer_of(own), f"{name} imports {other}, which is above it"
            assert part in ALLOWED_PARTS.get(own, {part}), f"{name} imports {other}"


@pytest.mark.parametrize("path", core_modules(), ids=module_name)
def test_core_modules_name_no_tool_in_a_string(path):
    """Such as the argument of `import_module`. Docstrings may mention tools."""
    tree = ast.parse(path.read_text())
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert "minidist.tools" not in node.value, f"{module_name(path)}:{node.lineno}"


TRAINING_PROGRAM = """
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
slow = ("torch._dynamo", "sympy", "matplotlib")  # seconds, which every rank would take before its first step
print([name for name in sys.modules if name.startswith("minidist.tools") or name in slow])
"""


def test_training_imports_no_tool_and_not_the_compiler(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    command = [sys.executable, "-c", TRAINING_PROGRAM]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stdout + result.stderr


def test_the_command_of_the_exercises_starts_without_torch():
    """The rank server imports it anyway: a second that each check would take twice."""
    program = "import sys, exercises.__main__; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stdout + result.stderr


def test_the_simple_trainer_is_short():
    lines = simple_trainer_lines()
    assert sum(lines.values()) <= SIMPLE_TRAINER_LINES and max(lines.values()) <= SIMPLE_TRAINER_FILE_LINES, lines
    for path in (PACKAGE / "simple").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= SIMPLE_TRAINER_FUNCTION_LINES, f"{path.name}: {node.name} has {length} lines"


def test_readme_states_the_numbers_of_lines():
    readme = (ROOT / "README.md").read_text()
    for label, lines in (("together", core_lines()), ("simple trainer", simple_trainer_lines())):
        (stated,) = re.findall(rf"^\| {label} \|.*\| ([\d,]+) \|$", readme, re.MULTILINE)
        count = sum(lines.values())
        assert abs(int(stated.replace(",", "")) - count) < 0.01 * count, f"README: {label} is {count:,}"


def test_there_is_no_import_cycle():
    """Imports within functions count: they hide a cycle and do not undo it."""
    paths = {module_name(path): path for folder in ("minidist", "bench") for path in (ROOT / folder).rglob("*.py")}
    edges = {name: (imported_names(path) & paths.keys()) - {name} for name, path in paths.items()}
    # `from minidist.tools.shm import start` is an import of the module, not of the package around it.
    for name, others in edges.items():
        edges[name] = {other for other in others if not any(more.startswith(f"{other}.") for more in others)}
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules


def test_the_core_defines_each_constant_once():
    """Of two modules with a public constant of the same name and value, a change would reach only one."""
    places: dict[tuple[str, str], list[str]] = {}
    for path in core_modules():
        if path.parent.name == "simple":  # written to be read by itself
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and re.fullmatch("[A-Z][A-Z_]*", ast.unparse(node.targets[0])):
                places.setdefault((ast.unparse(node.targets[0]), ast.unparse(node.value)), []).append(path.name)
    assert {key: found for key, found in places.items() if len(found) > 1} == {}


def test_only_comm_and_launch_talk_to_torch_distributed():
    allowed = (PACKAGE / "comm", PACKAGE / "tools")
    for path in MODULES:
        if not path.is_relative_to(allowed[0]) and not path.is_relative_to(allowed[1]):
            assert not any(name.startswith("torch.distributed") for name in imported_names(path)), path


def test_environment_variables_are_read_in_launch_only():
    for path in MODULES:
        # The backend's switch for nccl must work in programs that were not started by us.
        if not path.is_relative_to(LAUNCH) and path.parts[-2:] != ("shm", "gpu.py"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_finds_nothing(check):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *check, "--quiet", "."], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_file_names_a_local_path():
    """Such as the path of a developer's checkout."""
    suspicious = ("/" + "work/", "/" + "farm/")
    for path in [*MODULES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert not any(word in text for word in suspicious), path
