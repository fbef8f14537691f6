"""Read the configuration from a TOML file."""

import tomllib
from pathlib import Path

from minidist.config import Config
from minidist.config_text import convert_toml_value, parse_config_text
from minidist.errors import UserError


def read_config_file(path: Path, base: Config | None = None) -> Config:
    """Read a run's configuration from a TOML file.

    base: the configuration whose values the file's values replace; None: the defaults. Raises UserError for an
    unreadable file, unknown keys and values of a wrong type.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}. Give a TOML file.") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path} is not a TOML file: it is not text.") from None
    return parse_config_text(text, str(path), base)


def read_rank_count(path: Path) -> int | None:
    """Return the number of ranks in a TOML configuration file, its key `ranks`; None without that key.

    `ranks` is no field of `Config`, so `read_config_file` ignores it.
    """
    ranks = tomllib.loads(Path(path).read_text()).get("ranks")
    return None if ranks is None else convert_toml_value(ranks, int, f"{path}: ranks")
