"""A row's name, read back: the case that it is the name of, without the thousands of others that `--full` has."""

import dataclasses
import difflib

from minidist.errors import UserError
from minidist.tools.parity.cases import SWITCHES, Case
from minidist.tools.parity.layouts import Layout, layouts
from minidist.tools.parity.plan import case_with, switches_of
from minidist.validation import validate


def case_named(name: str, ranks: int) -> Case:
    """The combination of N ranks, or of one, whose `Case.name` this is.

    Raises UserError, which says what is not right, when no combination that `--full` has on so many ranks is named so.
    """
    layout = _layout(name, ranks)
    plain = case_with(layout, {switch: values[0] for switch, values in SWITCHES.items()})
    meaning = _meaning(plain)
    chosen = {}
    for word in name.removeprefix(str(layout)).split():
        if word not in meaning:
            near = difflib.get_close_matches(word, meaning, 1)
            raise UserError(
                f"{word!r} is no word of a row on {layout}" + (f"; {near[0]!r} is one." if near else _known(meaning))
            )
        chosen |= meaning[word]
    case = dataclasses.replace(plain, **chosen)
    if case.name != name:
        raise UserError(f"a row says its words in one order, each once: this one is named {case.name!r}.")
    for switch, possible in switches_of(layout).items():
        if (value := getattr(case, switch)) not in possible:
            values = ", ".join(map(str, possible))
            raise UserError(f"{switch} is {value}, and on {layout} it can only be {values}.")
    validate(case.config(), case.world)
    return case


def _layout(name: str, ranks: int) -> Layout:
    """The layout whose words a name begins with; of two, the one that says more."""
    known = layouts(ranks)
    able = [layout for layout in [Layout(), *known] if name.startswith(f"{layout} ")]
    if not able:
        raise UserError(f"it begins with none of the layouts of {ranks} ranks, which are like {str(known[-1])!r}.")
    return max(able, key=lambda layout: len(str(layout)))


def _meaning(plain: Case) -> dict[str, dict]:
    """What each word of a name says, by looking at what a value of a switch does to the name of a plain case."""
    said: dict[str, dict] = {word: {} for word in plain.name.removeprefix(str(plain.plan)).split()}
    for switch, values in SWITCHES.items():
        for value in values[1:]:
            case = dataclasses.replace(plain, **{switch: value})
            (word,) = set(case.name.split()) - set(plain.name.split())
            said[word] = {switch: value}
    return said


def _known(meaning: dict[str, dict]) -> str:
    return f"; its words are {', '.join(meaning)}."
