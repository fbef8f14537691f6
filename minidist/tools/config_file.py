"""Read the configuration from TOML, as `config.to_toml` writes it. Unknown keys are refused."""

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minidist.config import Config, option_fields
from minidist.errors import UserError, format_count, suggest
from minidist.tools.option_suggestions import suggest_options
from minidist.tools.options import option_names
from minidist.train.resume import read_stored_config

if TYPE_CHECKING:
    from minidist.fault.index import Index

# TOML's types in plain words.
_TOML_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a section",
}


def read_config_file(path: Path, base: Config | None = None) -> Config:
    """Read a run's configuration from a TOML file.

    base: the configuration whose values the file's values replace; None: the defaults. The options in the file count as
    given by the user (`Config.given`), unless it has every section: then it is the record of a run, which lists all
    options. Raises UserError for an unreadable file, unknown keys and values of a wrong type.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}. Give a TOML file.") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path} is not a TOML file: it is not text.") from None
    config, values = parse_config_text(text, str(path), base), tomllib.loads(text)
    sections = [item.name for item in option_fields(Config) if dataclasses.is_dataclass(getattr(config, item.name))]
    if values.keys() >= set(sections):
        return config
    keys = [f"{name}.{key}" for name in sections for key in values.get(name, ())]
    keys += [key for key in values if key not in sections]
    return dataclasses.replace(config, given=config.given | {key.replace("_", "-") for key in keys})


def read_rank_count(path: Path) -> int | None:
    """Return the number of ranks in a TOML configuration file, its key `ranks`; None without that key.

    `ranks` is no field of `Config`, so `read_config_file` ignores it.
    """
    ranks = tomllib.loads(Path(path).read_text()).get("ranks")
    return None if ranks is None else _convert(ranks, int, f"{path}: ranks")


def parse_config_text(text: str, name: str, base: Config | None = None) -> Config:
    """Read a run's configuration from TOML text.

    name: names the source of the text in messages. base: the configuration whose values the text's values replace;
    None: the defaults. Raises UserError for invalid TOML, unknown keys and values of a wrong type.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not a TOML file: {error}") from None
    values.pop("ranks", None)  # `read_rank_count`
    return _merge(base or Config(), values, name, "")


def _merge(into: Any, values: dict, path: str, prefix: str) -> Any:
    hints, changes = typing.get_type_hints(type(into)), {}
    hints = {item.name: hints[item.name] for item in option_fields(into)}
    for key, value in values.items():
        name = prefix + key
        if key not in hints:
            raise UserError(f"{path}: there is no option {name}; {_suggest(name, value, hints)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                meant = _name_in_toml(suggest_options(name, _known_options()))
                guess = f"; did you mean {meant}?" if meant else ""
                raise UserError(f"{path}: {name} is a section, not a value: write [{name}] and its fields below{guess}")
            changes[key] = _merge(getattr(into, key), value, path, name + ".")
        else:
            changes[key] = _convert(value, hints[key], f"{path}: {name}")
    return dataclasses.replace(into, **changes)


def _suggest(name: str, value: Any, hints: dict[str, Any]) -> str:
    """Return the end of a message about an unknown key: the options that may be meant, or those of its section.

    name: with its section. value: given to it. hints: the keys of its section.
    """
    prefix = name.rpartition(".")[0]
    if isinstance(value, dict) or not (found := suggest_options(name, _known_options())):
        keys = hints if prefix else ["ranks", *hints]
        return suggest(name.rpartition(".")[2], keys, prefix=prefix and prefix + ".")
    return f"did you mean {_name_in_toml(found)}?"


def _known_options() -> list[str]:
    """Return the names of all options that a file may have, as on the command line."""
    return ["ranks", *dict.fromkeys(option_names(Config).values())]


def _name_in_toml(options: list[str]) -> str:
    """Return suggested options as they are written in a file: `zero.stage = 3`."""
    written = []
    for option in options:
        name, space, value = option.partition(" ")
        quoted = value if value.isdigit() else f'"{value}"'
        written.append(name.replace("-", "_") + (f" = {quoted}" if space else ""))
    return " or ".join(written)


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Convert a TOML value to the type `kind`. Raises UserError if it has another type."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # the second where one of them is a Literal
        (kind,) = [option for option in typing.get_args(kind) if option is not types.NoneType]
        if value == "none":  # TOML has no null
            return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in arguments:
            return value
        raise UserError(f"{name} is {value!r}; {suggest(str(value), map(str, arguments))}")
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise UserError(f"{name} has {format_count(len(value), 'value')}; it must have {len(arguments)}")
        return tuple(_convert(item, arguments[0], name) for item in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise UserError(f"{name} is {value!r}, {_TOML_NAMES.get(type(value), 'a date')}; it must be {_expected(kind)}")


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "a list of numbers"
    return "a text" if kind is Path else _TOML_NAMES[kind]


def parse_checkpoint_config(index: "Index") -> Config:
    """Return the configuration of the run that wrote a checkpoint, from the checkpoint's index.

    Raises UserError if the checkpoint has no configuration, because another program wrote it; DamagedError if the
    configuration in it is not valid.
    """
    read_stored_config(index)
    return parse_config_text(index.state["config"], str(index.path))
