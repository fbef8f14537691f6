"""Each fault of tests/faults, applied to a copy of the package, makes parity or the test that it names fail."""

import json
import re
import sys

import pytest

from minidist.tools.parity.command import NAME_SEPARATOR
from tests.helpers.fault_patches import (
    FAULTS,
    PACKAGE,
    Edit,
    Fault,
    copy_package,
    read_fault,
    read_faults,
    run_on_copy,
)
from tests.helpers.undefined_names import find_undefined_names

DEADLINE_S = 240.0
FAULT_LIST = read_faults()

pytestmark = [
    pytest.mark.usefixtures("_nothing_is_left_behind"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only"),
]


def test_no_fault_fails_because_of_an_undefined_name(tmp_path):
    texts = {}
    for fault in FAULT_LIST:
        for edit in fault.edit:
            text = texts.get((fault.name, edit.file)) or (PACKAGE / edit.file).read_text()
            assert text.count(edit.find) == 1, f"{fault.name}: {edit.find}"
            texts[fault.name, edit.file] = text.replace(edit.find, edit.replace)
    assert find_undefined_names({" ".join(key): text for key, text in texts.items()}, tmp_path) == []


def run_parity(folder, only, ranks):
    """Run these parity rows on the copy in `folder`; return exit code, the JSON report and the output."""
    file = folder / "rows.json"
    arguments = ["--ranks", str(ranks), "--only", NAME_SEPARATOR.join(only), "--json", str(file)]
    code, output = run_on_copy(folder, "minidist.tools.parity", arguments, DEADLINE_S)
    assert code is not None, f"parity was not done after {DEADLINE_S:g} s; it printed\n{output}"
    assert file.exists(), f"parity ended with exit code {code} and no rows; it printed\n{output}"
    return code, json.loads(file.read_text()), output


def count_rows(results):
    """The number of rows that ran or could not run."""
    return len(results["rows"]) + len(results["not_run"])


@pytest.mark.parametrize("fault", [fault for fault in FAULT_LIST if fault.only], ids=lambda fault: fault.name)
def test_each_fault_fails_parity_at_the_expected_first_value(fault, tmp_path):
    assert_parity_is_red(tmp_path, fault, fault.only[:1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [fault for fault in FAULT_LIST if fault.only[1:]], ids=lambda fault: fault.name)
def test_each_fault_fails_all_of_its_parity_rows(fault, tmp_path):
    assert_parity_is_red(tmp_path, fault, fault.only[1:])


def assert_parity_is_red(folder, fault, rows):
    code, results, output = run_parity(copy_package(folder, fault.edit), rows, fault.ranks)
    messages = [row["first_wrong"] for row in results["rows"]] + [row["why"] for row in results["not_run"]]
    assert code == 1 and count_rows(results) == len(rows), f"{fault.title} It stayed green:\n{output}"
    assert not any(row["ok"] for row in results["rows"]), f"{fault.title} A row stayed green:\n{output}"
    unexpected = [text for text in messages if not re.search(fault.expect, text)]
    assert not unexpected, f"expected {fault.expect!r} to be wrong first, not:\n" + "\n".join(unexpected)


@pytest.mark.parametrize("fault", [fault for fault in FAULT_LIST if fault.detector], ids=lambda fault: fault.name)
def test_each_fault_with_a_detector_fails_that_test(fault, tmp_path):
    detector = f"{FAULTS.parent.parent}/{fault.detector}"
    # Without pyproject's pythonpath, which would put the real package before the patched copy.
    plain = ["-p", "no:cacheprovider", "-o", "pythonpath=", "--basetemp", str(tmp_path / "temporary")]
    arguments = ["-x", *plain, "-m", "", detector]
    code, output = run_on_copy(copy_package(tmp_path, fault.edit), "pytest", arguments, DEADLINE_S)
    assert code is not None, f"{fault.detector} was not done after {DEADLINE_S:g} s; it printed\n{output}"
    # An assertion must fail, not an import or a missing name: those fail with and without the fault.
    failed = (
        code == 1
        and f"FAILED {fault.detector}" in output
        and re.search(r"^E +(AssertionError\b|assert |Failed: DID NOT RAISE)", output, re.MULTILINE)
    )
    assert failed, f"{fault.title} {fault.detector} did not notice:\n{output}"


@pytest.mark.parametrize("ranks", sorted({fault.ranks for fault in FAULT_LIST}))
def test_parity_passes_without_a_fault(ranks, tmp_path):
    assert_rows_are_green(ranks, tmp_path, slice(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", sorted({fault.ranks for fault in FAULT_LIST}))
def test_all_parity_rows_of_the_faults_pass_without_a_fault(ranks, tmp_path):
    assert_rows_are_green(ranks, tmp_path, slice(None))


def assert_rows_are_green(ranks, tmp_path, which):
    only = sorted({name for fault in FAULT_LIST if fault.ranks == ranks for name in fault.only[which]})
    code, results, output = run_parity(copy_package(tmp_path), only, ranks)
    assert code == 0 and count_rows(results) == len(only) and all(row["ok"] for row in results["rows"]), output


def test_a_program_that_hangs_is_ended_at_its_deadline(tmp_path):
    (tmp_path / "endless.py").write_text("import minidist\nprint('on my way', flush=True)\nwhile True: pass\n")
    code, output = run_on_copy(copy_package(tmp_path), "endless", [], deadline_s=0.5)
    assert code is None


def test_a_patch_that_does_not_apply_exactly_once_is_an_error(tmp_path):
    for number, (find, times) in enumerate((("no such text", 0), ("import", r"\d+"))):
        with pytest.raises(ValueError, match=f"train/engine.py has this text {times} times, not once"):
            copy_package(tmp_path / str(number), [Edit("train/engine.py", find, "")])


def test_an_incomplete_or_misspelt_fault_is_refused(tmp_path):
    edit = (Edit("a.py", "x", "y"),)
    for wrong in ({"edit": (), "detector": "t"}, {"edit": edit}, {"edit": edit, "only": ("a",)}):
        with pytest.raises(ValueError, match="needs edits, and either"):
            Fault("name", "title", "source", **wrong)
    with pytest.raises(ValueError, match="needs edits, and either"):
        Fault("name", "title", "source", edit, only=("a",), expect="b", detector="t")
    misspelt = 'title = "t"\nsource = "s"\nexpct = "x"\n[[edit]]\nfile = "f"\nfind = "a"\nreplace = "b"\n'
    (tmp_path / "f.toml").write_text(misspelt)
    with pytest.raises(TypeError, match="expct"):
        read_fault(tmp_path / "f.toml")


def test_enough_faults_are_read():
    assert len(FAULT_LIST) > 40 and len([fault for fault in FAULT_LIST if fault.only]) > 30
