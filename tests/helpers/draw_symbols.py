"""Draw public symbols of the package at random, as a reader sees them who has not seen the code.

    python -m tests.helpers.draw_symbols --count 60 --seed 1               # module, name, arguments
    python -m tests.helpers.draw_symbols --count 60 --seed 1 --docstrings  # and the docstring

Show the first form to an engineer of the field and ask what each symbol does; show the second and ask which docstrings
were clear at first reading.
"""

import argparse
import ast
import importlib
import inspect
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def public_symbols() -> Iterator[tuple[str, str, str]]:
    """(module, signature, docstring) of every public function, class, method and property of the package.

    A method without a docstring of its own has that of the base class whose method it overrides. The docstring of a
    class includes those below its fields.
    """
    for file in sorted((ROOT / "minidist").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from _symbols_in(ast.parse(file.read_text()).body, module, "")


def _symbols_in(body: list[ast.stmt], module: str, owner: str) -> Iterator[tuple[str, str, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node) or (owner and _inherited_docstring(module, owner + node.name)) or ""
        if isinstance(node, ast.ClassDef):
            arguments, fields = _constructor(node)
            text = "\n".join(filter(None, [text, *fields]))
            yield module, f"class {node.name}({arguments})", text
            yield from _symbols_in(node.body, module, f"{node.name}.")
        else:
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield module, f"{owner}{node.name}({ast.unparse(node.args)}){result}", text


def _constructor(node: ast.ClassDef) -> tuple[str, list[str]]:
    """Return the arguments of a class, and the docstrings below its fields, as `name: docstring`."""
    arguments, fields = [], []
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return ast.unparse(item.args).removeprefix("self").removeprefix(", "), fields
        if isinstance(item, ast.AnnAssign) and not (name := ast.unparse(item.target)).startswith("_"):
            arguments.append(name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                fields.append(f"{name}: {inspect.cleandoc(str(below.value.value))}")
    return ", ".join(arguments), fields


def _inherited_docstring(module: str, method: str) -> str:
    owner, name = method.split(".")[-2:]
    cls = getattr(importlib.import_module(module), owner, None)
    return inspect.getdoc(getattr(cls, name, None)) or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docstrings", action="store_true", help="show each symbol's docstring, too")
    options = parser.parse_args()
    drawn = random.Random(options.seed).sample(list(public_symbols()), options.count)
    for number, (module, signature, text) in enumerate(drawn, start=1):
        print(f"{number:>3}. {module}: {signature}")
        if options.docstrings:
            print("\n".join(f"       {line}" for line in (text or "(no docstring)").splitlines()))


if __name__ == "__main__":
    main()
