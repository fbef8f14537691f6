"""Parses a row's name into its case, without listing the thousands of cases of `--full`."""

import dataclasses
import difflib

from minidist.errors import UserError
from minidist.tools.parity.cases import SWITCHES, Case
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.tools.parity.plan import make_case, possible_switch_values
from minidist.validation import validate


def parse_case_name(name: str, ranks: int) -> Case:
    """Return the case with this name (`Case.name`).

    ranks: the number of ranks if the case is distributed; a name without a mesh is a case of one rank.
    Raises UserError, which names the wrong word, if no case of `--full` has this name.
    """
    layout = _parse_layout(name, ranks)
    plain = make_case(layout, {switch: values[0] for switch, values in SWITCHES.items()})
    meaning = _switch_values_by_word(plain)
    chosen = {}
    for word in name.removeprefix(str(layout)).split():
        if word not in meaning:
            near = difflib.get_close_matches(word, meaning, 1)
            raise UserError(
                f"{word!r} is not a word of a row on {layout}"
                + (f"; did you mean {near[0]!r}?" if near else f"; its words are {', '.join(meaning)}.")
            )
        chosen |= meaning[word]
    case = dataclasses.replace(plain, **chosen)
    if case.name != name:
        raise UserError(f"a row has its words in one order, each once: this one is named {case.name!r}.")
    for switch, possible in possible_switch_values(layout).items():
        if (value := getattr(case, switch)) not in possible:
            values = ", ".join(map(str, possible))
            raise UserError(f"{switch} is {value}, and on {layout} it can only be {values}.")
    validate(case.config(), case.world_size)
    return case


def _parse_layout(name: str, ranks: int) -> Layout:
    """The layout whose text the name begins with; the longest of several."""
    known = list_layouts(ranks)
    able = [layout for layout in [Layout(), *known] if name.startswith(f"{layout} ")]
    if not able:
        raise UserError(f"it begins with none of the layouts of {ranks} ranks, which are like {str(known[-1])!r}.")
    return max(able, key=lambda layout: len(str(layout)))


def _switch_values_by_word(plain: Case) -> dict[str, dict]:
    """The switch value that each word of a name means, found by changing one switch of the default case at a time."""
    by_word: dict[str, dict] = {word: {} for word in plain.name.removeprefix(str(plain.mesh_layout)).split()}
    for switch, values in SWITCHES.items():
        for value in values[1:]:
            case = dataclasses.replace(plain, **{switch: value})
            (word,) = set(case.name.split()) - set(plain.name.split())
            by_word[word] = {switch: value}
    return by_word
