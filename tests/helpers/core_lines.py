"""Lines of the core: every module of the package outside `minidist/tools`, with docstrings, comments and blank lines.

The simple trainer and the simple versions of single parts are counted apart from the rest.

`python -m tests.helpers.core_lines` prints the count by folder.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "minidist"
TOP = "top level"


def core_modules() -> list[Path]:
    """The files of the core. `__main__.py` is not among them: it is the entry of the command line, which is a tool."""
    modules = sorted(PACKAGE.rglob("*.py"))
    return [path for path in modules if path.relative_to(PACKAGE).parts[0] not in ("tools", "__main__.py")]


def is_simple_version(path: Path) -> bool:
    """Whether a file is a simple version of a part of the fast trainer: a `simple.py`, or in its folder `simple`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "simple" in parts and parts[0] != "simple"


def simple_trainer_lines() -> dict[str, int]:
    """Lines of each file of the simple trainer, `minidist/simple`, by its name."""
    return {path.name: len(path.read_text().splitlines()) for path in sorted((PACKAGE / "simple").glob("*.py"))}


def core_lines() -> dict[str, int]:
    """Lines by folder, without anything simple; the modules at the top level together."""
    lines: dict[str, int] = {}
    for path in core_modules():
        if not is_simple_version(path) and path.parent.name != "simple":
            parts = path.relative_to(PACKAGE).parts
            folder = parts[0] if len(parts) > 1 else TOP
            lines[folder] = lines.get(folder, 0) + len(path.read_text().splitlines())
    return lines


def simple_lines() -> dict[Path, int]:
    """Lines of each file of the simple versions."""
    return {path: len(path.read_text().splitlines()) for path in core_modules() if is_simple_version(path)}


if __name__ == "__main__":
    counts = core_lines()
    simple = ("simple trainer", simple_trainer_lines()), ("simple versions", simple_lines())
    totals = ("together", sum(counts.values())), *((name, sum(lines.values())) for name, lines in simple)
    for name, count in [*sorted(counts.items()), *totals]:
        print(f"{name:<16}{count:>8,}")
