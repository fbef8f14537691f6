"""Lines of the core: every module of the package outside `minidist/tools`, with docstrings, comments and blank lines.

The simple trainer is counted apart from the rest.

`python -m tests.helpers.core_lines` prints the count by folder.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "minidist"
TOP = "top level"


def core_modules() -> list[Path]:
    """The files of the core. `__main__.py` is not among them: it is the entry of the command line, which is a tool."""
    modules = sorted(PACKAGE.rglob("*.py"))
    return [path for path in modules if path.relative_to(PACKAGE).parts[0] not in ("tools", "__main__.py")]


def simple_trainer_lines() -> dict[str, int]:
    """Lines of each file of the simple trainer, `minidist/simple`, by its name."""
    return {path.name: len(path.read_text().splitlines()) for path in sorted((PACKAGE / "simple").glob("*.py"))}


def core_lines() -> dict[str, int]:
    """Lines by folder, without the simple trainer; the modules at the top level together."""
    lines: dict[str, int] = {}
    for path in core_modules():
        parts = path.relative_to(PACKAGE).parts
        if parts[0] != "simple":
            folder = parts[0] if len(parts) > 1 else TOP
            lines[folder] = lines.get(folder, 0) + len(path.read_text().splitlines())
    return lines


if __name__ == "__main__":
    counts = core_lines()
    totals = ("together", sum(counts.values())), ("simple trainer", sum(simple_trainer_lines().values()))
    for name, count in [*sorted(counts.items()), *totals]:
        print(f"{name:<16}{count:>8,}")
