"""Read the configuration from TOML text, as `config.to_toml` writes it. Unknown keys are refused."""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from minidist.config import Config, option_fields
from minidist.errors import UserError, format_count, suggest

# TOML's types in plain words.
_TOML_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a section",
}


def parse_config_text(
    text: str, name: str, base: Config | None = None, suggest_option: Callable[[str], str] = lambda name: ""
) -> Config:
    """Read a run's configuration from TOML text.

    name: names the source of the text in messages. base: the configuration whose values the text's values replace;
    None: the defaults. suggest_option: returns what the user may have meant by an unknown name, as it is written in a
    file, "" if nothing is known; its section is searched then. Raises UserError for invalid TOML, unknown keys and
    values of a wrong type.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not a TOML file: {error}") from None
    values.pop("ranks", None)  # of the command line
    return _merge_values(base or Config(), values, name, "", suggest_option)


def _merge_values(into: Any, values: dict, path: str, prefix: str, suggest_option: Callable[[str], str]) -> Any:
    """Return the (sub)configuration `into` with `values` from TOML in place of its own.

    path: names the source in messages. prefix: stands before the option names of this section, as "train.".
    """
    hints = typing.get_type_hints(type(into))
    changes = {}
    hints = {item.name: hints[item.name] for item in option_fields(into)}
    for key, value in values.items():
        name = prefix + key
        if key not in hints:
            keys = hints if prefix else ["ranks", *hints]
            meant = "" if isinstance(value, dict) else suggest_option(name)
            advice = f"did you mean {meant}?" if meant else suggest(key, keys, prefix=prefix)
            raise UserError(f"{path}: there is no option {name}; {advice}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                meant = suggest_option(name)
                guess = f"; did you mean {meant}?" if meant else ""
                raise UserError(f"{path}: {name} is a section, not a value: write [{name}] and its fields below{guess}")
            changes[key] = _merge_values(getattr(into, key), value, path, name + ".", suggest_option)
        else:
            changes[key] = convert_toml_value(value, hints[key], f"{path}: {name}")
    return dataclasses.replace(into, **changes)


def convert_toml_value(value: Any, kind: Any, name: str) -> Any:
    """Convert a TOML value to an option's type `kind`. Raises UserError, naming the option, if it has another type."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # the second where one of them is a Literal
        (kind,) = [option for option in typing.get_args(kind) if option is not types.NoneType]
        if value == "none":  # TOML has no null
            return None
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Literal:
        if value in arguments:
            return value
        raise UserError(f"{name} is {value!r}; {suggest(str(value), map(str, arguments))}")
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise UserError(f"{name} has {format_count(len(value), 'value')}; it must have {len(arguments)}")
        return tuple(convert_toml_value(item, arguments[0], name) for item in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise UserError(f"{name} is {value!r}, {_TOML_NAMES.get(type(value), 'a date')}; it must be {_describe_type(kind)}")


def _describe_type(kind: Any) -> str:
    """Return, for a message, the values that an option of type `kind` takes."""
    if typing.get_origin(kind) is tuple:
        return "a list of numbers"
    return "a text" if kind is Path else _TOML_NAMES[kind]
