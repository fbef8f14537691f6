"""Command-line options from a dataclass; the docstring of each field is its help text.

A field `name: type = default` is the option `--name value`; a field that is itself a dataclass is a section, whose
options are `--section.name value`. Supported types: bool (`--name` and `--no-name`), int, float, str, Path, Literal,
tuples of these (several values, one after the other), and each of them or None.
"""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minidist.config import option_fields
from minidist.errors import UserError, format_count, suggest
from minidist.tools.option_suggestions import suggest_options

# Markers for a field's type. Annotated[Config, FLAT]: its options have no prefix; Annotated[str, POSITIONAL]:
# a positional argument; Annotated[..., HIDDEN]: an option that help leaves out.
FLAT, POSITIONAL, HIDDEN = "flat", "positional", "hidden"

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
# Words that other programs take as the value of a bool option.
_SWITCH_WORDS = ("true", "false", "on", "off", "yes", "no")
_COLUMN = 30


@dataclass(frozen=True)
class _Option:
    """One option of a command.

    name: without the leading dashes. path: the names of the nested fields that lead to its value. kind: the type of the
    value, without None. optional: whether the value may be None. help: its help text. section: the title under which
    the help lists it, "" for none. positional: whether it is a positional argument. hidden: whether the help omits it.
    """

    name: str
    path: tuple[str, ...]
    kind: Any
    optional: bool
    help: str
    section: str
    positional: bool = False
    hidden: bool = False

    @property
    def negated_name(self) -> str:
        """The name of the option that sets this bool option to False: `zero.no-prefetch` for `zero.prefetch`."""
        section, _, last = self.name.rpartition(".")
        return f"{section}.no-{last}" if section else f"no-{last}"

    @property
    def is_list(self) -> bool:
        """Whether the option takes several values."""
        return typing.get_origin(self.kind) is tuple

    @property
    def item_type(self) -> Any:
        """The type of one value of a tuple; otherwise the option's type."""
        return typing.get_args(self.kind)[0] if self.is_list else self.kind


def parse_options(
    kind: type, program: str, words: Sequence[str], default: Any = None, keep_unknown: bool = False
) -> Any:
    """Parse command-line `words` into an instance of the dataclass `kind`, whose fields are the options.

    `--help` prints the help and raises SystemExit. program: the command's name in messages and help. default: an
    instance whose values replace the defaults of `kind`. keep_unknown: return (instance, list of unknown words) instead
    of raising UserError for an unknown option. Raises UserError for a wrong or missing value.
    """
    options = _list_options(kind)
    if {"-h", "--help"} & set(words):
        print(_help_text(kind, program, options, default))
        raise SystemExit(0)
    by_name = {option.name: option for option in options if not option.positional}
    negated = {option.negated_name: option for option in options if option.kind is bool}
    positionals = [option for option in options if option.positional]
    values: dict[tuple[str, ...], Any] = {}
    unknown: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--"):
            if keep_unknown:
                unknown.append(word)
            elif not positionals:
                raise UserError(f"{word!r} belongs to no option; options begin with --. {program} --help lists them.")
            else:
                option = positionals[0] if positionals[0].is_list else positionals.pop(0)
                value = _convert_word(option, word)
                values[option.path] = (*values.get(option.path, ()), value) if option.is_list else value
        elif name in by_name and by_name[name].kind is not bool:
            option = by_name[name]
            given = [inline] if equals else _take_values(option, rest)
            value = _parse_value(option, given)
            repeats = option.is_list and typing.get_args(option.kind)[-1] is Ellipsis and value is not None
            values[option.path] = (*(values.get(option.path) or ()), *value) if repeats else value
        elif name in by_name or name in negated:
            option = by_name.get(name) or negated[name]
            value = inline if equals else rest[0] if rest and rest[0].lower() in _SWITCH_WORDS else None
            if value is not None:
                raise UserError(
                    f"--{name} takes no value, but {value!r} was given: write --{option.name} alone to turn it on, "
                    f"--{option.negated_name} to turn it off."
                )
            values[option.path] = name in by_name
        elif keep_unknown:
            unknown.append(word)
        else:
            guess = _suggest(name, [*by_name, *negated])
            raise UserError(f"there is no option --{name}{guess} {program} --help lists all of them.")
    made = _construct(kind, values, program, options) if default is None else _replace_fields(default, values)
    return (made, unknown) if keep_unknown else made


def option_names(kind: type) -> dict[str, str]:
    """Return the names, without dashes, of a command's options that are not positional, and what each one sets.

    kind: the dataclass of the command's options. A bool option has two names, of which the second sets it to False;
    both have the first name as their value here.
    """
    options = [option for option in _list_options(kind) if not option.positional]
    negated = {option.negated_name: option.name for option in options if option.kind is bool}
    return {option.name: option.name for option in options} | negated


def given_options(kind: type, words: Sequence[str]) -> frozenset[str]:
    """Return the names of the options that occur in `words`, a command line; a negated one by its positive name.

    kind: the dataclass of the command's options.
    """
    names = option_names(kind)
    found = [word.removeprefix("--").partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    return frozenset(names[name] for name in found if name in names)


def _list_options(kind: type, path: tuple[str, ...] = (), prefix: str = "", section: str = "") -> list[_Option]:
    """Return the options of dataclass `kind`: its own fields first, then those of nested dataclasses ("sections").

    A section's name is the prefix of its options, as in "train.steps". A nested dataclass marked FLAT is not a section:
    its options have no prefix and come before all sections. The other arguments describe where a nested `kind` belongs:
    path, the names of the fields that lead to it; prefix, of its options' names; section, its title in the help.
    """
    plain, nested = [], []
    hints, documented = typing.get_type_hints(kind, include_extras=True), _field_docstrings(kind)
    for field in option_fields(kind):
        hint, marks = hints[field.name], ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        name, optional = prefix + field.name.replace("_", "-"), False
        if dataclasses.is_dataclass(hint):
            flat = FLAT in marks
            nested += _list_options(hint, (*path, field.name), "" if flat else f"{name}.", "" if flat else name)
            continue
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            (hint,) = [one for one in typing.get_args(hint) if one is not types.NoneType]
            optional = True
        plain.append(
            _Option(
                name,
                (*path, field.name),
                hint,
                optional,
                documented.get(field.name, ""),
                section,
                POSITIONAL in marks,
                HIDDEN in marks,
            )
        )
    return plain + sorted(nested, key=lambda option: option.section != "")


def _help_text(kind: type, program: str, options: Sequence[_Option], default: Any = None) -> str:
    """Format the help of a command, as wide as the terminal but at most 100 columns.

    kind: the dataclass of the command's options; its docstring is the description. program: the command. options: from
    `_list_options`. default: an instance of `kind` with the defaults to show; None for those of `kind`.
    """
    width = help_width()
    shown = sorted((option for option in options if not option.hidden), key=lambda option: not option.positional)
    places = "".join(f" {_metavar(option)}" for option in shown if option.positional)
    lines = [f"usage: {program}{places} [OPTIONS]", ""]
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), width), ""]
    sections = dict.fromkeys(option.section for option in shown)
    for section in sections:
        about = _section_help(kind, section)
        title = f"{section}: {about}" if about else section or "options:"
        lines += textwrap.wrap(title, width)
        for option in shown:
            if option.section == section:
                lines += _format_option_help(option, _default_of(kind, default, option.path), width)
        lines.append("")
    return "\n".join(lines).rstrip()


def help_width() -> int:
    """Return how many columns wide to print help: the width of the terminal, but at least 40 and at most 100."""
    return min(100, max(40, shutil.get_terminal_size().columns))


def _format_option_help(option: _Option, default: Any, width: int) -> list[str]:
    """Return the help lines of one option, at most `width` columns wide."""
    head = f"  {_metavar(option)}" if option.positional else f"  --{option.name}"
    if option.kind is bool:
        head += f", --{option.negated_name}" * bool(default)
    elif not option.positional:
        head += f" {_metavar(option)}"
    text = " ".join(option.help.split())
    if not any(default is nothing for nothing in (None, False, (), dataclasses.MISSING)):
        text += f" (default: {_format_default(default)})"
    indent = " " * min(_COLUMN, width // 3)
    body = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    if len(head) > width:  # many choices
        cut = head.rindex(",", 0, width) + 1
        body.insert(0, indent + head[cut:])
        head = head[:cut]
    if len(head) < len(indent) - 1 and body:
        return [head.ljust(len(indent)) + body[0].lstrip(), *body[1:]]
    return [head, *body]


def _metavar(option: _Option) -> str:
    """Return the placeholder for the option's value in the help, such as "N" or "{gloo,nccl}"."""
    if typing.get_origin(option.item_type) is Literal:
        one = "{" + ",".join(map(str, typing.get_args(option.item_type))) + "}"
    elif option.positional:
        one = option.name.upper()
    else:
        one = _METAVARS.get(option.item_type, "VALUE")
    if not option.is_list:
        return f"[{one}]" if option.positional and option.optional else one
    counted = typing.get_args(option.kind)
    return f"[{one} ...]" if counted[-1] is Ellipsis else " ".join([one] * len(counted))


def _format_default(value: Any) -> str:
    """Return a default value as it is written on a command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _take_values(option: _Option, rest: list[str]) -> list[str]:
    """Remove the values of `option` from the front of `rest`, the words behind it; return them."""
    given = []
    while rest and not rest[0].startswith("--") and (option.is_list or not given):
        given.append(rest.pop(0))
    return given


def _parse_value(option: _Option, given: list[str]) -> Any:
    """Convert the words given for an option to its value. Raises UserError."""
    if option.optional and len(given) == 1 and given[0].lower() == "none":
        return None
    if not given:
        raise UserError(f"--{option.name} needs a value: {_describe_expected(option)}.")
    values = tuple(_convert_word(option, word) for word in given)
    if not option.is_list:
        return values[0]
    counted = typing.get_args(option.kind)
    if counted[-1] is not Ellipsis and len(values) != len(counted):
        raise UserError(f"--{option.name} has {format_count(len(values), 'value')}; it needs {len(counted)}.")
    return values


def _convert_word(option: _Option, word: str) -> Any:
    """Convert one word to the option's type. Raises UserError."""
    name = option.name.upper() if option.positional else f"--{option.name}"
    if typing.get_origin(option.item_type) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(option.item_type)}
        if word not in choices:
            raise UserError(f"{name} is {word!r}; {suggest(word, choices)}")
        return choices[word]
    try:
        return option.item_type(word)
    except ValueError:
        raise UserError(f"{name} is {word!r}; it must be {_describe_expected(option)}.") from None


def _describe_expected(option: _Option) -> str:
    """Return which values the option takes, for an error message."""
    if typing.get_origin(option.item_type) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option.item_type)))
    one = _TYPE_NAMES[option.item_type]
    return f"{one} or several" if option.is_list else one


def _suggest(given: str, names: Collection[str]) -> str:
    """Return the end of a sentence that names options similar to the unknown name `given`."""
    if found := suggest_options(given, names):
        return f"; did you mean {' or '.join(f'--{option}' for option in found)}?"
    section = [f"--{name}" for name in names if name.startswith(f"{given}.") and not name.startswith(f"{given}.no-")]
    return f": {given} is a section, with the options {', '.join(section)}." if section else "."


def _construct(kind: type, values: dict[tuple[str, ...], Any], program: str, options: Sequence[_Option]) -> Any:
    """Construct `kind` from the given values and its defaults."""
    required = {}
    for option in options:
        if _default_of(kind, None, option.path) is dataclasses.MISSING:
            if option.path not in values:
                name = option.name.upper() if option.positional else f"--{option.name} {_metavar(option)}"
                about = " ".join(option.help.split())
                raise UserError(f"{name} is missing. {about} {program} --help lists all options.")
            required[option.path[0]] = values.pop(option.path)
    return _replace_fields(kind(**required), values)


def _replace_fields(instance: Any, values: dict[tuple[str, ...], Any]) -> Any:
    """Copy a dataclass instance with the nested fields at these paths replaced."""
    fields: dict[str, dict[tuple[str, ...], Any]] = {}
    for (first, *rest), value in values.items():
        fields.setdefault(first, {})[tuple(rest)] = value
    changes = {
        name: below[()] if () in below else _replace_fields(getattr(instance, name), below)
        for name, below in fields.items()
    }
    return dataclasses.replace(instance, **changes)


def _default_of(kind: type, default: Any, path: tuple[str, ...]) -> Any:
    """Return the default of an option; dataclasses.MISSING if it is required."""
    if default is None:
        field = next(field for field in dataclasses.fields(kind) if field.name == path[0])
        factory = field.default_factory
        default, path = field.default if factory is dataclasses.MISSING else factory(), path[1:]
    for name in path:
        default = getattr(default, name)
    return default


def _section_help(kind: type, section: str) -> str:
    """Return the first sentence of the docstring of a section's class."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hint := hints[field.name]):
            if field.name.replace("_", "-") == section:
                return " ".join((hint.__doc__ or "").split())
            if found := _section_help(hint, section):
                return found
    return ""


def _field_docstrings(kind: type) -> dict[str, str]:
    """Read the docstring below each field of a dataclass from its source; Python does not keep it."""
    found = {}
    for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[field.target.id] = ast.literal_eval(below.value)
    return found
