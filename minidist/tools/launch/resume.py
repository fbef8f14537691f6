"""Resuming a run: the run folder of an earlier attempt, and checks before any rank starts."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.checkpoint import folders
from minidist.config import Config
from minidist.data.corpus import Corpus
from minidist.errors import UserError
from minidist.tools.config_file import read_config_file
from minidist.tools.launch.run_folder_guard import CONFIG, JOB, open_checked_run_folder
from minidist.tools.launch.torchrun import read_job_name
from minidist.train.resume import check_resumable, find_changed_options, load_first_intact
from minidist.train.run_folder import AUTO, RUNS, RunFolder, find_checkpoints_folder

if TYPE_CHECKING:
    from minidist.comm.world import World

_FOLDER_KEY = "run_folder"


def share_run_folder_across_restarts(world: "World", config: Config) -> Config:
    """Return `config`, on rank 0 with the run folder that this job used before torchrun restarted its ranks.

    torchrun restarts all ranks when one fails, or when a node joins. Rank 0 notes the folder in the store of torchrun's
    agent, which outlives the ranks, and the job's name, `--rdzv-id`, in the folder, which outlives the node. After a
    restart rank 0 finds the folder by either note, and the run resumes from its newest checkpoint. At the first start
    rank 0 chooses and creates the folder. Before all this, rank 0 downloads the newest checkpoint of
    `checkpoint.remote`, if any. Other ranks return `config` as it is: the trainer takes folder and checkpoints from
    rank 0.
    """
    if world.rank > 0:
        return config
    fetch_remote_checkpoint(config)
    job = read_job_name()
    folder = _read_folder_from_store(world) or (job and _find_folder_of_job(job, config))
    if folder:
        saved = folders.complete_checkpoints(find_checkpoints_folder(folder))
        resume = AUTO if saved else config.checkpoint.resume
        config = dataclasses.replace(
            config, folder=folder, checkpoint=dataclasses.replace(config.checkpoint, resume=resume)
        )
    else:
        with contextlib.suppress(UserError):  # the trainer raises it again, on all ranks
            config = dataclasses.replace(config, folder=open_checked_run_folder(config).path)
    if config.folder is not None:
        if world.store is not None:
            world.store.set(_FOLDER_KEY, str(config.folder))
        if job:
            with contextlib.suppress(OSError):
                (config.folder / JOB).write_text(job)
    return config


def fetch_remote_checkpoint(config: Config) -> None:
    """Download the newest checkpoint of `--checkpoint.remote`, unless the run folder has one at least as new.

    Prints a note on what was downloaded. Does nothing if `config.checkpoint.remote` is None.
    """
    if config.checkpoint.remote is None:
        return
    from minidist.tools.remote import fetch_newer_checkpoint

    if note := fetch_newer_checkpoint(config):
        print(note, file=sys.stderr, flush=True)


def _read_folder_from_store(world: "World") -> Path | None:
    """Return the run folder that an earlier attempt noted in the store; None if there is no note."""
    if world.store is None or not world.store.check([_FOLDER_KEY]):
        return None
    return Path(world.store.get(_FOLDER_KEY).decode())


def _find_folder_of_job(job: str, config: Config) -> Path | None:
    """Return the newest run folder of a job, `config.folder` if that is given; None if there is none.

    A run of other options belongs to an earlier job of the same name.
    """
    candidates = [Path(config.folder)] if config.folder else sorted(RUNS.glob("[0-9]*"), reverse=True)
    for folder in candidates:
        with contextlib.suppress(OSError):
            if (folder / JOB).read_text() == job:
                before = folder / CONFIG
                return None if before.exists() and find_changed_options(read_config_file(before), config) else folder
    return None


def check_resume(run: RunFolder, config: Config, corpus: Corpus) -> None:
    """Raise UserError if `config` cannot continue from the checkpoint that the run would resume from.

    Called before any rank starts. run: the run folder, with the checkpoints to try, newest first. corpus: the training
    data.
    """
    if run.checkpoints:
        from minidist.checkpoint.load import read_index  # here: it imports torch

        load_first_intact(run.checkpoints, lambda path: check_resumable(read_index(path), config, corpus))
