"""Which names a text mentions in code, and whether they exist: `find_unknown_names`, `find_unknown_paths`.

Names are looked up in the source text of the repository, which needs no import, and in torch and the standard library.
"""

import ast
import builtins
import importlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.hooks import RemovableHandle

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("minidist", "exercises")
_SOURCE_SUFFIXES = (".py", ".toml", ".md", ".ipynb")
# Modules under the names by which texts call them.
_ALIASES = {"dist": dist, "F": F, "nn": nn, "np": np, "torch": torch}
_LIBRARIES = sys.stdlib_module_names | {"numpy", "safetensors"}
# Where torch's names come from that texts mention alone. A name of one word, such as `add`, may mean anything.
_TORCH_OWNERS = (
    torch, dist, dist.distributed_c10d, dist.Backend, dist.ProcessGroup, dist.Work, F, nn.Module, nn.utils,
    torch._C._distributed_c10d, torch.autograd.Function, torch.optim.Optimizer, torch.Tensor, torch.utils.checkpoint,
    torch.utils.data,
)  # fmt: skip
TORCH_NAMES = frozenset(name for owner in _TORCH_OWNERS for name in dir(owner) if re.search(r"\w_|[a-z][A-Z]", name))
BUILTINS = frozenset(dir(builtins)) | frozenset(dir(math)) | {"mean", "silu", "softmax"}


def code_spans(text: str) -> list[str]:
    """Return what stands between single backticks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@cache
def parsed_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package and of `exercises`, without the tasks, by module name."""
    files = [*sorted((ROOT / "minidist").rglob("*.py")), *sorted((ROOT / "exercises").glob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, files, strict=True)}


@cache
def public_names() -> frozenset[str]:
    """Return the names of all modules, of their public functions, classes and constants, and of all settings."""
    names: set[str] = set()
    for module, tree in parsed_modules().items():
        names |= {*module.split("."), *(name for name in _defined_names(tree) if not name.startswith("_"))}
    for node in parsed_modules()["minidist.config"].body:
        names |= members(node.name) if isinstance(node, ast.ClassDef) else set()
    return frozenset(names)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """The classes at the top level of modules, by name; several modules may have one of the same name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in parsed_modules().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def members(class_name: str) -> frozenset[str]:
    """Return the fields, methods and attributes of the package's classes of this name, inherited ones included."""
    names: set[str] = set()
    for node in _classes().get(class_name, ()):
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                names.add(part.name)
            elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                names.add(part.id if isinstance(part, ast.Name) else part.attr)
        for base in node.bases:
            name = ast.unparse(base).split("[")[0].split(".")[-1]
            names |= members(name) if name != class_name and name in _classes() else _members_in_libraries(name)
    return frozenset(names)


def _members_in_libraries(name: str) -> set[str]:
    owners = [owner for owner in (torch, dist, nn, torch.autograd, torch.optim, builtins) if hasattr(owner, name)]
    return {member for owner in owners for member in dir(getattr(owner, name))}


def identifiers(tree: ast.Module) -> set[str]:
    """Return all names in code: of variables, attributes, arguments, functions and imports, and strings that are names.

    Docstrings do not count. For a class imported from a library, except Tensor, its members count.
    """
    names, codes = set(), [compile(tree, "", "exec", dont_inherit=True)]  # faster than walking the tree
    while codes:
        code = codes.pop()
        names |= {code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            for text in constant if isinstance(constant, tuple | frozenset) else (constant,):
                if isinstance(text, str) and re.fullmatch(r"[\w.-]+", text):
                    names |= {*re.split(r"[.-]", text)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in _LIBRARIES | {"torch"}:
            imported = importlib.import_module(node.module)
            for name in {alias.name for alias in node.names} - {"Tensor"}:  # whose methods have the commonest names
                names |= set(dir(getattr(imported, name))) if name[0].isupper() else set()
    return names


@cache
def all_members() -> frozenset[str]:
    """Return the members of all classes of the package and of the classes that tensors, models and optimizers have."""
    libraries = (torch.Tensor, nn.Module, nn.Parameter, torch.optim.Optimizer, RemovableHandle, dist.Work, dict, list)
    names = {name for class_name in _classes() for name in members(class_name)}
    return frozenset(names.union(*(dir(owner) for owner in libraries)))


def members_of_classes(names: set[str]) -> set[str]:
    """Return the members of all classes of the package that are among `names`, and the arguments of their methods."""
    found = set()
    for name in names & _classes().keys():
        found |= members(name) | _method_arguments(name)
    return found


@cache
def _method_arguments(class_name: str) -> frozenset[str]:
    methods = [part for node in _classes()[class_name] for part in node.body if isinstance(part, ast.FunctionDef)]
    return frozenset(each.arg for method in methods for each in (*method.args.args, *method.args.kwonlyargs))


def find_unknown_names(code: str, known: set[str]) -> list[str]:
    """List the names of a piece of code that are neither `known` nor of the package, torch or the standard library.

    code: an expression, or `module:symbol`; anything else, also an option or a path, names nothing. A dotted name is
    looked up in its class or module if it begins with one. Names of one or two letters (sizes, indices) and
    placeholders in capitals (`NAME`) are not looked up. known: further names, each by itself.
    """
    if code.startswith("-") or re.search(r"\w/\w|^/", code):
        return []
    if re.fullmatch(r"(minidist|exercises)[\w.]*:\w[\w.]*", code):
        code = code.replace(":", ".")
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        return []
    unknown = []
    for chain, keywords in _chains(tree.body):
        unknown += [chain] if not _exists(chain, known) else []
        if _external(chain) is None and chain.split(".")[-1] not in TORCH_NAMES:
            unknown += [word for word in keywords if not _exists(word, known)]
    return unknown


def _chains(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield each dotted name of an expression, with the keywords of its call."""
    match node:
        case ast.Call():
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            for number, (chain, _) in enumerate(_chains(node.func)):
                yield chain, keywords if number == 0 else []
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from _chains(each)
        case ast.Name():
            yield node.id, []
        case ast.Attribute():
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *parts]), []
            else:
                yield from ((part, []) for part in parts)
                yield from _chains(inner)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _chains(child)


@cache
def _is_public(name: str) -> bool:
    return name in public_names() or name in BUILTINS or name in TORCH_NAMES


def _exists(chain: str, known: set[str]) -> bool:
    head, *rest = chain.split(".")
    if _is_placeholder(head):
        return True
    if head in PACKAGES and rest:
        return _is_in_repository(chain)
    if head in _classes() and rest:
        return rest[0] in members(head)
    if (external := _external(chain)) is not None:
        return external
    return all(_is_placeholder(part) or part in known or _is_public(part) for part in (head, *rest))


def _is_placeholder(name: str) -> bool:
    return len(name) <= 2 or (name.isupper() and "_" not in name) or "NAME" in name


def _is_in_repository(chain: str) -> bool:
    """Whether a full dotted name is that of a module, a symbol or a member of a class; a prefix of a module will do."""
    modules = parsed_modules()
    if any(f"{module}.".startswith(f"{chain}.") for module in modules):
        return True
    module, _, symbol = chain.rpartition(".")
    if module in modules:
        return symbol in identifiers(modules[module])
    module, _, owner = module.rpartition(".")
    return module in modules and owner in set(_defined_names(modules[module])) and symbol in members(owner)


@cache
def _external(chain: str) -> bool | None:
    """Whether a library has a dotted name; None unless it begins with a module, or a class of torch or Python."""
    head, *rest = chain.split(".")
    owners = (torch, nn, dist, torch.optim, builtins)
    classes = [owner for owner in owners if head[0].isupper() or owner is builtins]
    classes = [owner for owner in classes if isinstance(getattr(owner, head, None), type)]
    if not rest or not (head in _ALIASES or head in _LIBRARIES or classes):
        return None
    if head in _ALIASES:
        owner = _ALIASES[head]
    else:
        owner = getattr(classes[0], head) if classes else importlib.import_module(head)
    for part in rest:
        if isinstance(owner, ModuleType) and not hasattr(owner, part):
            try:
                importlib.import_module(f"{owner.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


@cache
def _repository_paths() -> frozenset[str]:
    """Return every file of the repository and every folder, also without the leading folders, as `comm/meter.py`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = set()
    for file in map(PurePosixPath, listed):
        for path in (file, file.with_suffix("")):
            for stop in range(1, len(path.parts) + 1):
                ends |= {"/".join(path.parts[start:stop]) for start in range(stop)}
    return frozenset(ends)


def find_unknown_paths(code: str) -> list[str]:
    """List the path that `code` is, if it looks like one of the repository and no file or folder has it.

    It looks like one if it ends in a suffix of sources or a slash, or if slashes join words in small letters. Absolute
    paths and placeholders (`NAME`, `<exercise>`) do not. A path may lack its leading folders, and `.py`.
    """
    is_source = code.endswith((*_SOURCE_SUFFIXES, "/")) and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*/?", code)
    if not is_source and not re.fullmatch(r"[a-z]\w*(/[a-z0-9_]+)+", code):
        return []
    if re.search(r"(^|/)[A-Z]+(/|\.|$)", code) and code not in _repository_paths():
        return []
    return [] if code.rstrip("/") in _repository_paths() else [code]
