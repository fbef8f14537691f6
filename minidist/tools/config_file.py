"""Read the configuration from a TOML file."""

import dataclasses
import tomllib
from pathlib import Path

from minidist.config import Config, option_fields
from minidist.config_text import convert_toml_value, parse_config_text
from minidist.errors import UserError
from minidist.tools.option_suggestions import suggest_options
from minidist.tools.options import option_names


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
    config, values = parse_config_text(text, str(path), base, suggest_in_toml), tomllib.loads(text)
    sections = [item.name for item in option_fields(Config) if dataclasses.is_dataclass(getattr(config, item.name))]
    if values.keys() >= set(sections):
        return config
    keys = [f"{name}.{key}" for name in sections for key in values.get(name, ())]
    keys += [key for key in values if key not in sections]
    return dataclasses.replace(config, given=config.given | {key.replace("_", "-") for key in keys})


def suggest_in_toml(name: str) -> str:
    """Return the options that may be meant by an unknown `name`, as they are written in a file: `zero.stage = 3`."""
    written = []
    for option in suggest_options(name, ["ranks", *dict.fromkeys(option_names(Config).values())]):
        found, space, value = option.partition(" ")
        quoted = value if value.isdigit() else f'"{value}"'
        written.append(found.replace("-", "_") + (f" = {quoted}" if space else ""))
    return " or ".join(written)


def read_rank_count(path: Path) -> int | None:
    """Return the number of ranks in a TOML configuration file, its key `ranks`; None without that key.

    `ranks` is no field of `Config`, so `read_config_file` ignores it.
    """
    ranks = tomllib.loads(Path(path).read_text()).get("ranks")
    return None if ranks is None else convert_toml_value(ranks, int, f"{path}: ranks")
