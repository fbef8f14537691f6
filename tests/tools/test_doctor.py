"""`minidist doctor`: its findings, a remedy for every problem, and the exit code."""

import json

import pytest
import torch

from minidist.tools import doctor as doctor_module
from minidist.tools.cli import main
from minidist.tools.doctor import DoctorOptions, Finding, doctor


@pytest.fixture
def without_ranks(monkeypatch):
    """Skip the checks that start processes."""
    monkeypatch.delitem(doctor_module.CHECKS, "ranks")
    monkeypatch.delitem(doctor_module.CHECKS, "links")


def collect_findings(capsys) -> tuple[int, dict]:
    code = doctor(DoctorOptions(json=True))
    report = json.loads(capsys.readouterr().out)
    return code, {finding["name"]: finding for finding in report["findings"]}


def test_training_can_run_where_the_tests_run(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"]
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert values.keys() == doctor_module.CHECKS.keys()
    assert torch.__version__ in values["torch"] and "gloo" in values["backends"]
    names = ["2 ranks", "gloo", "shm", "nccl"]
    assert [line.partition(":")[0] for line in values["links"].splitlines()][:4] == names
    assert "two ranks started by" in values["ranks"] and "usable" in values["cores"]
    assert "with 1 rank," in values["threads per rank"] and "with 4 ranks" in values["threads per rank"]
    for finding in report["findings"]:
        assert (finding["problem"] is None) == (finding["fix"] is None)


def test_the_table_says_each_problem_and_its_remedy(capsys, monkeypatch):
    looks = {
        "good": lambda name: Finding(name, "fine"),
        "poor": lambda name: Finding(name, "slow [x]", "it is slow", "make it fast"),
    }
    monkeypatch.setattr(doctor_module, "CHECKS", looks)
    assert doctor(DoctorOptions()) == 0
    output = capsys.readouterr().out
    assert (
        "slow [x]" in output and "poor: it is slow\n  make it fast\n" in output and "Training can run here." in output
    )
    looks["bad"] = lambda name: Finding(name, "none", "it is not there", "install it", blocks=True)
    assert doctor(DoctorOptions()) == 1
    assert "Training cannot run here." in capsys.readouterr().out


def test_a_check_that_raises_is_a_finding(capsys, monkeypatch):
    def fail(name):
        raise OSError("no such thing")

    monkeypatch.setattr(doctor_module, "CHECKS", {"odd": fail})
    code, findings = collect_findings(capsys)
    assert code == 0 and "OSError: no such thing" in findings["odd"]["problem"]


def test_another_torch_is_noted(capsys, monkeypatch, without_ranks):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    code, findings = collect_findings(capsys)
    assert code == 0 and ">= 2.11 and < 2.14 only" in findings["torch"]["problem"]
    assert findings["torch"]["fix"] == "pip install 'torch>=2.11,<2.14'"


def test_a_torch_without_gloo_stops_training(capsys, monkeypatch, without_ranks):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    code, findings = collect_findings(capsys)
    assert code == 1 and findings["backends"]["blocks"]


@pytest.mark.parametrize(("asked", "problem"), [("64", "two ranks would run 128 threads on"), ("many", "is 'many'")])
def test_omp_num_threads_that_hurts_is_reported(capsys, monkeypatch, without_ranks, asked, problem):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    code, findings = collect_findings(capsys)
    assert problem in findings["threads per rank"]["problem"]
    assert findings["threads per rank"]["fix"] == "unset OMP_NUM_THREADS"
    assert code == (1 if asked == "many" else 0)


def test_ranks_that_do_not_work_stop_training(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    monkeypatch.setattr(doctor_module, "CHECKS", {"ranks": doctor_module.CHECKS["ranks"]})
    code, findings = collect_findings(capsys)
    assert code == 1 and findings["ranks"]["problem"] and findings["ranks"]["fix"]


def test_a_missing_compiler_is_noted(capsys, monkeypatch, without_ranks):
    monkeypatch.setenv("PATH", "/nowhere")
    code, findings = collect_findings(capsys)
    assert code == 0 and findings["C++ compiler"]["fix"].startswith("install g++")
