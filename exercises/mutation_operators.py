"""Mutation operators: the small changes that a mistake may make to one node of a syntax tree."""

import ast
import copy
from collections.abc import Iterator

_TRAFFIC = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "batch", "barrier")
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "sum": "max"}
_DIRECTIONS = {"send": "recv", "recv": "send", "isend": "irecv", "irecv": "isend"}
_DTYPES = {"int64": "int32", "int32": "int64", "float64": "float32", "float32": "float64", "float": "int"}
_COUNTERS = ("rank", "world_size", "size", "i", "index", "_next")
_NUMBERS = ("range", "arange", "divmod")  # their arguments are counts

# What replaces a node: another node, or text.
Change = tuple[str, ast.AST, ast.AST | str]


def _copy_with(node: ast.AST, **fields) -> ast.AST:
    """Copy a node with some fields replaced."""
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def mutations_of(node: ast.AST) -> Iterator[Change]:
    """Yield the mutations of this node alone as (kind, replaced node, replacement)."""
    if isinstance(node, ast.stmt):
        yield from _mutate_statement(node)
    for block in ("body", "orelse"):
        yield from _swap_neighbours(getattr(node, block, None))
    for condition in _get_conditions(node):
        if not isinstance(condition, ast.UnaryOp | ast.Compare):  # these have mutations that negate them
            yield "negate a condition", condition, ast.UnaryOp(ast.Not(), condition)
    for kind, change in _mutate_expression(node):
        yield kind, node, change
    if isinstance(node, ast.For):
        yield "skip an element", node.iter, f"list({ast.unparse(node.iter)})[1:]"
        yield "skip an element", node.iter, f"list({ast.unparse(node.iter)})[:-1]"
        yield "other order", node.iter, f"list({ast.unparse(node.iter)})[::-1]"


def _mutate_statement(node: ast.stmt) -> Iterator[Change]:
    """Yield the mutations of a statement as a whole."""
    if isinstance(node, ast.Continue | ast.Break):
        yield "continue and break", node, ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return nothing", node, "return None"
    if isinstance(node, ast.AugAssign):
        if type(node.op) in _ARITHMETIC:
            yield "other operator", node, _copy_with(node, op=_ARITHMETIC[type(node.op)]())
        yield "drop an operand", node, ast.Assign([node.target], node.value, lineno=node.lineno)
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.While | ast.If):
        yield _name_of_drop(node), node, "pass"


def _swap_neighbours(block: object) -> Iterator[Change]:
    """Yield swaps of adjacent one-line statements."""
    block = block if isinstance(block, list) else []
    for one, two in zip(block, block[1:], strict=False):
        if one.lineno == one.end_lineno and two.lineno == two.end_lineno == one.lineno + 1:
            place = ast.Pass(**{name: getattr(one, name) for name in ("lineno", "col_offset")})
            place.end_lineno, place.end_col_offset = two.end_lineno, two.end_col_offset
            yield "swap statements", place, f"{ast.unparse(two)}\n{' ' * one.col_offset}{ast.unparse(one)}"


def _name_of_drop(node: ast.stmt) -> str:
    """Return the kind of mutation that drops a statement."""
    value = getattr(node, "value", None)
    called = _called_name(value) if isinstance(value, ast.Call) else ""
    if called in ("wait", "barrier"):
        return f"drop a {called}"
    return "drop a message" if called in _TRAFFIC else "drop a statement"


def _called_name(node: ast.Call) -> str:
    """Return the last part of the called function's name; "" if it has none."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _get_conditions(node: ast.AST) -> list[ast.expr]:
    """Return the conditions of an if, a loop, a conditional expression or a comprehension."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _mutate_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """Yield the mutations of an expression as (kind, replacement)."""
    match node:
        case ast.BinOp(left, op, right):
            if type(op) in _ARITHMETIC:
                yield "other operator", _copy_with(node, op=_ARITHMETIC[type(op)]())
            yield "drop an operand", left
            if isinstance(op, ast.Add | ast.Mult):
                yield "drop an operand", right
        case ast.Compare(_, [op], _):
            for other in _COMPARISONS[type(op)]:
                yield "other comparison", _copy_with(node, ops=[other()])
        case ast.BoolOp(op, values):
            yield "and or or", _copy_with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield "drop an operand", rest[0] if len(rest) == 1 else _copy_with(node, values=rest)
        case ast.UnaryOp(ast.Not(), operand):
            yield "drop a not", operand
        case ast.UnaryOp(ast.USub(), operand):
            yield "drop a sign", operand
        case ast.IfExp(_, body, orelse):
            yield "always one branch", body
            yield "always one branch", orelse
        case ast.Constant():
            yield from _mutate_constant(node)
        case ast.Call():
            yield from _mutate_call(node)
        case ast.Subscript(_, ast.Slice() as cut):
            for name in ("lower", "upper"):
                if (end := getattr(cut, name)) is not None:
                    yield "off by one", _copy_with(node, slice=_copy_with(cut, **{name: _add_one(end)}))
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            if name in _COUNTERS:
                yield "other rank or number", _add_one(node)
            if name in _DTYPES and isinstance(node, ast.Attribute):
                yield "other dtype", _copy_with(node, attr=_DTYPES[name])


def _add_one(node: ast.expr) -> ast.BinOp:
    """Return the expression plus 1."""
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _mutate_constant(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    """Yield the mutations of a constant as (kind, replacement)."""
    if isinstance(node.value, bool):
        yield "other flag", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "other constant", ast.Constant(node.value + 1)
        yield "other constant", ast.Constant(node.value - 1)
    elif node.value in ("max", "min", "sum"):
        yield "other reduction", ast.Constant({"max": "min", "min": "max", "sum": "max"}[node.value])


def _mutate_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Yield the mutations of a call as (kind, replacement)."""
    name, args = _called_name(node), node.args
    tables = {"min and max and their like": _NAMES, "other dtype": _DTYPES, "other direction": _DIRECTIONS}
    for kind, table in tables.items():
        if isinstance(node.func, ast.Name) and name in table:
            yield kind, _copy_with(node, func=ast.Name(table[name]))
    if isinstance(node.func, ast.Attribute) and name in _NAMES:
        yield "min and max and their like", _copy_with(node, func=_copy_with(node.func, attr=_NAMES[name]))
    if isinstance(node.func, ast.Attribute) and not args and not node.keywords:
        yield "drop a call", node.func.value
    elif len(args) == 1:
        yield "drop a call", args[0]
    for i in range(len(args) - 1 if name not in ("min", "max") else 0):
        yield "swap arguments", _copy_with(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
    for i in range(len(node.keywords)):
        yield "drop an argument", _copy_with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
    if len(args) > 2:
        yield "drop an argument", _copy_with(node, args=args[:-1])
    if name in _NUMBERS:
        for i in range(len(args)):
            yield "off by one", _copy_with(node, args=[*args[:i], _add_one(args[i]), *args[i + 1 :]])
