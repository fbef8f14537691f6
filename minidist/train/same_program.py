"""Check that all ranks run the same program: with different options or code they would train silently wrong."""

import dataclasses
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import minidist
from minidist.comm import Group, all_gather, all_gather_object
from minidist.config import Config, option_fields
from minidist.errors import UserError, format_ranks

# Options that may differ between ranks: rank 0 decides on the folder, and the corpora are compared by their content.
_MAY_DIFFER = ("folder", "device", "checkpoint.resume", "data.path", "data.source")


def check_same_program(config: Config, group: Group) -> None:
    """Collective: raise UserError on all ranks unless all ranks of `group` have the same options and package source.

    The options in `_MAY_DIFFER` are not compared. The message names the options and their values by rank, or the source
    files. Sends 8 bytes per rank if all agree.
    """
    if group.size == 1:
        return
    facts = {**_flatten_options(config), **_hash_source_files(Path(minidist.__file__).parent)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    mine = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(group.world.control_device)
    digests = torch.empty(group.size, dtype=torch.int64, device=mine.device)
    all_gather(digests, mine, group, async_op=True).wait(host=True)
    if len(set(digests.tolist())) == 1:
        return
    by_rank = all_gather_object(facts, group)
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    differing = [_format_values(name, by_rank) for name in names if len({f.get(name) for f in by_rank}) > 1]
    what = "were started with different options"
    fix = "Give all of them the same options"
    if any(text.startswith("file ") for text in differing):
        what = "run different code"
        fix = "Install the same version of minidist for all of them"
    more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
    raise UserError(f"the ranks {what}: {'; '.join(differing[:4])}{more}. {fix}.")


def _flatten_options(section: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of all options that must agree, as text, by name: {"optim.lr": "0.003"}."""
    found: dict[str, str] = {}
    for field in option_fields(section):
        name = field.name
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            found |= _flatten_options(value, f"{prefix}{name}.")
        elif prefix + name not in _MAY_DIFFER:
            found[(prefix + name).replace("_", "-")] = str(value)
    return found


def _hash_source_files(package: Path) -> dict[str, str]:
    """Return a short hash of each source file of the package, by "file " and its path."""
    files = sorted(package.rglob("*.py"))
    return {f"file {file.relative_to(package)}": hashlib.sha256(file.read_bytes()).hexdigest()[:8] for file in files}


def _format_values(name: str, by_rank: list[dict[str, str]]) -> str:
    """Return for the message which values an option or file has on which ranks."""
    ranks: dict[str | None, list[int]] = defaultdict(list)
    for rank, facts in enumerate(by_rank):
        ranks[facts.get(name)].append(rank)
    return f"{name} is " + ", ".join(f"{value or 'missing'} on {format_ranks(at)}" for value, at in ranks.items())
