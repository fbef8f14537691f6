"""The examples in launch/: their options exist, and the Slurm script saves and queues itself again."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from minidist.tools.cli import parse_train_options

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def check_torchrun_words(words):
    """Parse the options of torchrun and of `minidist train`; returns both."""
    assert words[0] == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert options.module and options.training_script == "minidist" and options.training_script_args[0] == "train"
    return options, parse_train_options(options.training_script_args[1:])[0]


def test_the_slurm_script_starts_an_elastic_job():
    text = (LAUNCH / "slurm.sh").read_text()
    command = re.search(r"^srun (?:--\S+ )*(torchrun .*?) \"\$@\" &$", text.replace("\\\n", " "), re.MULTILINE)[1]
    words = command.replace('"', "").replace("$SLURM_JOB_NUM_NODES", "4").replace("$SLURM_JOB_ID", "7").split()
    options, config = check_torchrun_words(words)
    assert options.nnodes == "1:4" and options.max_restarts > 0 and config.folder == Path("runs/slurm-7")
    # The ranks have to end before Slurm kills the job.
    assert options.shutdown_timeout < int(re.search(r"--signal=B:USR1@(\d+)", text)[1])


FAKE_SRUN = """#!/bin/bash
trap 'echo saved; exit 1' TERM
echo started
while true; do sleep 0.05; done
"""
FAKE_SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo node0 && exit
echo "$@"
"""


@pytest.mark.parametrize("is_signalled", [True, False])
def test_a_slurm_job_that_reaches_its_time_limit_is_queued_again(tmp_path, is_signalled):
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text if is_signalled or name != "srun" else "#!/bin/bash\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(
        ["bash", LAUNCH / "slurm.sh"],
        env={**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        if is_signalled:
            assert script.stdout.readline() == "started\n"
            script.send_signal(signal.SIGUSR1)
        output = script.stdout.read()
    # A job that fails by itself is not queued again: it would fail for ever.
    assert output == ("saved\nrequeue 7\n" if is_signalled else "")
    assert script.returncode != 0


def test_the_train_job_starts_torchrun_and_leaves_it_time_to_save():
    job = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    options, config = check_torchrun_words(job["spec"]["trainer"]["command"])
    (override,) = job["spec"]["podTemplateOverrides"]
    assert options.shutdown_timeout < override["spec"]["terminationGracePeriodSeconds"]
    (mount,) = override["spec"]["containers"][0]["volumeMounts"]
    assert config.folder.is_relative_to(mount["mountPath"])
