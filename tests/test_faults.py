"""Faults seen in public code, applied to a copy of the package: parity, or the test that the fault names, fails."""

import json
import re
import sys

import pytest

from minidist.tools.parity.command import NAME_SEPARATOR
from tests.helpers.fault_patches import FAULTS, Edit, Fault, ForkServer, copy, faults, read

DEADLINE_S = 240.0
KNOWN = faults()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a warm process on Linux only")


@pytest.fixture(scope="module")
def fork_server(_nothing_is_left_behind):
    server = ForkServer()
    yield server
    server.close()


def parity(fork_server, folder, only, ranks):
    """Run these rows of parity on the copy in `folder`: exit code, its JSON and what it printed."""
    file = folder / "rows.json"
    arguments = ["--ranks", str(ranks), "--only", NAME_SEPARATOR.join(only), "--json", str(file)]
    code, output = fork_server.run(folder, "minidist.tools.parity", arguments, DEADLINE_S)
    assert code is not None, f"parity was not done after {DEADLINE_S:g} s; it printed\n{output}"
    assert file.exists(), f"parity ended with exit code {code} and no rows; it printed\n{output}"
    return code, json.loads(file.read_text()), output


def rows_of(found):
    """How many rows ran, or could not."""
    return len(found["rows"]) + len(found["not_run"])


@pytest.mark.parametrize("fault", [fault for fault in KNOWN if fault.only], ids=lambda fault: fault.name)
def test_a_fault_turns_parity_red_and_the_first_wrong_value_is_named(fault, fork_server, tmp_path):
    parity_is_red(fork_server, tmp_path, fault, fault.only[:1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [fault for fault in KNOWN if fault.only[1:]], ids=lambda fault: fault.name)
def test_a_fault_turns_every_row_red_that_can_show_it(fault, fork_server, tmp_path):
    parity_is_red(fork_server, tmp_path, fault, fault.only[1:])


def parity_is_red(fork_server, folder, fault, rows):
    code, found, output = parity(fork_server, copy(folder, fault.edit), rows, fault.ranks)
    told = [row["first_wrong"] for row in found["rows"]] + [row["why"] for row in found["not_run"]]
    assert code == 1 and rows_of(found) == len(rows), f"{fault.title} It stayed green:\n{output}"
    assert not any(row["ok"] for row in found["rows"]), f"{fault.title} A row stayed green:\n{output}"
    unexpected = [text for text in told if not re.search(fault.expect, text)]
    assert not unexpected, f"expected {fault.expect!r} to be wrong first, not:\n" + "\n".join(unexpected)


@pytest.mark.parametrize("fault", [fault for fault in KNOWN if fault.detector], ids=lambda fault: fault.name)
def test_a_fault_that_parity_cannot_detect_fails_the_test_it_names(fault, fork_server, tmp_path):
    detector = f"{FAULTS.parent.parent}/{fault.detector}"
    # Without pyproject's pythonpath, which would put the package itself before the patched copy.
    plain = ["-p", "no:cacheprovider", "-o", "pythonpath=", "--basetemp", str(tmp_path / "temporary")]
    arguments = ["-x", *plain, "-m", "", detector]
    code, output = fork_server.run(copy(tmp_path, fault.edit), "pytest", arguments, DEADLINE_S)
    assert code is not None, f"{fault.detector} was not done after {DEADLINE_S:g} s; it printed\n{output}"
    # An assertion, not an import or a name that is gone: those fail with and without the fault.
    failed = (
        code == 1
        and f"FAILED {fault.detector}" in output
        and re.search(r"^E +(AssertionError: )?assert ", output, re.MULTILINE)
    )
    assert failed, f"{fault.title} {fault.detector} did not notice:\n{output}"


@pytest.mark.parametrize("ranks", sorted({fault.ranks for fault in KNOWN}))
def test_without_a_fault_the_rows_that_show_one_are_green(ranks, fork_server, tmp_path):
    rows_are_green(ranks, fork_server, tmp_path, slice(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", sorted({fault.ranks for fault in KNOWN}))
def test_without_a_fault_every_row_that_can_show_one_is_green(ranks, fork_server, tmp_path):
    rows_are_green(ranks, fork_server, tmp_path, slice(None))


def rows_are_green(ranks, fork_server, tmp_path, which):
    only = sorted({name for fault in KNOWN if fault.ranks == ranks for name in fault.only[which]})
    code, found, output = parity(fork_server, copy(tmp_path), only, ranks)
    assert code == 0 and rows_of(found) == len(only) and all(row["ok"] for row in found["rows"]), output


def test_a_program_that_hangs_is_ended_at_its_deadline(fork_server, tmp_path):
    (tmp_path / "endless.py").write_text("import minidist\nprint('on my way', flush=True)\nwhile True: pass\n")
    code, output = fork_server.run(copy(tmp_path), "endless", [], deadline_s=0.5)
    assert code is None


def test_a_patch_that_does_not_apply_exactly_once_is_an_error(tmp_path):
    for number, (find, times) in enumerate((("no such text", 0), ("import", r"\d+"))):
        with pytest.raises(ValueError, match=f"train/engine.py has this text {times} times, not once"):
            copy(tmp_path / str(number), [Edit("train/engine.py", find, "")])


def test_a_fault_without_an_edit_or_with_two_ways_to_be_found_is_refused(tmp_path):
    edit = (Edit("a.py", "x", "y"),)
    for wrong in ({"edit": (), "detector": "t"}, {"edit": edit}, {"edit": edit, "only": ("a",)}):
        with pytest.raises(ValueError, match="needs edits, and either"):
            Fault("name", "title", "source", **wrong)
    with pytest.raises(ValueError, match="needs edits, and either"):
        Fault("name", "title", "source", edit, only=("a",), expect="b", detector="t")
    misspelt = 'title = "t"\nsource = "s"\nexpct = "x"\n[[edit]]\nfile = "f"\nfind = "a"\nreplace = "b"\n'
    (tmp_path / "f.toml").write_text(misspelt)
    with pytest.raises(TypeError, match="expct"):
        read(tmp_path / "f.toml")


def test_there_are_faults():
    assert len(KNOWN) > 40 and len([fault for fault in KNOWN if fault.only]) > 30
