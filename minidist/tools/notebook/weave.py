"""Update the `%%piece` cells of notebooks from the package, and optionally execute the notebooks.

A `%%piece` cell shows the source of a function or class of the package, for the learner to change.

python -m minidist.tools.notebook.weave chapters          # cells that differ get the package's source
python -m minidist.tools.notebook.weave --run chapters    # and every notebook is run and stored
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minidist.errors import UserError
from minidist.tools.pieces import read_symbol_source

_MAGIC = "%%piece "
_CELL_S = 120


def find_piece_cells(notebook: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (index of the cell, symbol, source) for every `%%piece` cell of a notebook.

    A `%%piece` cell shows the source of a function or class of the package. notebook: as read by nbformat.
    """
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.source.startswith(_MAGIC):
            magic, _, source = cell.source.partition("\n")
            yield number, magic.removeprefix(_MAGIC).strip(), source


def find_stale_piece_cells(notebook: Any) -> list[tuple[int, str, str]]:
    """Return (index of the cell, symbol, package's source) for every `%%piece` cell that differs from the package.

    notebook: as read by nbformat. Raises UserError for a symbol that the package does not have.
    """
    wanted = (
        (number, name, source, read_symbol_source(name).rstrip("\n"))
        for number, name, source in find_piece_cells(notebook)
    )
    return [(number, name, now) for number, name, source, now in wanted if source != now]


def update_piece_cells(file: Path) -> list[str]:
    """Update the `%%piece` cells of a notebook file that differ from the package's source; return their symbols."""
    import nbformat

    notebook = nbformat.read(file, as_version=4)
    changed = find_stale_piece_cells(notebook)
    for number, name, source in changed:
        notebook.cells[number].source = f"{_MAGIC}{name}\n{source}"
    if changed:
        nbformat.write(notebook, file)
    return [name for _, name, _ in changed]


def _execute_notebook(file: Path) -> None:
    """Execute a notebook in its folder and store its outputs, without the times of execution."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(
        notebook, timeout=_CELL_S, kernel_name="python3", resources={"metadata": {"path": str(file.parent)}}
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    nbformat.write(notebook, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Replace the text of each `%%piece` cell, in all notebooks of a folder, by the source of the symbol that it names.

    With `--run`, also execute the notebooks and store their outputs.

    argv: the arguments of the command; those of the process if None. Returns exit code 0, or 2 when a folder holds no
    notebook or a cell names an unknown symbol.
    """
    parser = argparse.ArgumentParser(
        prog="python -m minidist.tools.notebook.weave", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="where the notebooks are, at any depth")
    parser.add_argument("--run", action="store_true", help="run each and store what it gives")
    options = parser.parse_args(argv)
    try:
        files = [file for file in sorted(options.folder.rglob("*.ipynb")) if ".ipynb_checkpoints" not in file.parts]
        if not files:
            raise UserError(f"{options.folder} holds no notebook")
        for file in files:
            for name in update_piece_cells(file):
                print(f"{file}: {name}")
            if options.run:
                _execute_notebook(file)
                print(f"{file}: run")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
