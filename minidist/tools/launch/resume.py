"""Resuming a run from the command line: the options of the earlier run, and checks before any rank starts.

torch is imported after the checkpoint has been found, so that a wrong path is reported at once.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.config import Config
from minidist.data.corpus import Corpus
from minidist.errors import DamagedError, UserError
from minidist.fault import folders
from minidist.train.resume import check_resumable, parse_checkpoint_config
from minidist.train.run_folder import AUTO, RunFolder, find_checkpoints_folder, open_run_folder

if TYPE_CHECKING:
    from minidist.comm.world import World

_FOLDER_KEY = "run_folder"


def resumed_config(resume: Path) -> Config:
    """Return the configuration of the run to resume, as the base for new options.

    resume: a run folder, its folder of checkpoints, or a checkpoint. Raises UserError if there is no intact checkpoint.
    """
    path = folders.latest_checkpoint(find_checkpoints_folder(resume))
    from minidist.fault import checkpoint

    stored = parse_checkpoint_config(checkpoint.read_index(path))
    return dataclasses.replace(
        stored, folder=None, checkpoint=dataclasses.replace(stored.checkpoint, resume=Path(resume))
    )


def share_run_folder_across_restarts(world: "World", config: Config) -> Config:
    """Return `config` with the run folder that this run used before torchrun restarted its ranks, if it did.

    torchrun restarts all ranks when one fails. Rank 0 notes the folder in torchrun's store, which outlives the ranks,
    and finds it there after a restart: the run then resumes from its newest checkpoint. The trainer takes folder and
    checkpoints from rank 0; other ranks change nothing here.
    """
    if world.rank > 0 or world.store is None:
        return config
    if world.store.check([_FOLDER_KEY]):
        folder = Path(world.store.get(_FOLDER_KEY).decode())
        saved = folders.complete_checkpoints(find_checkpoints_folder(folder))
        resume = AUTO if saved else config.checkpoint.resume
        return dataclasses.replace(
            config, folder=folder, checkpoint=dataclasses.replace(config.checkpoint, resume=resume)
        )
    with contextlib.suppress(UserError):  # the trainer raises it again, on all ranks
        config = dataclasses.replace(config, folder=open_run_folder(config).path)
        world.store.set(_FOLDER_KEY, str(config.folder))
    return config


def check_resume(run: RunFolder, config: Config, corpus: Corpus) -> None:
    """Raise UserError if `config` cannot continue from the checkpoint it would resume. Runs before any rank starts."""
    for path in run.checkpoints:
        from minidist.fault import checkpoint

        try:
            check_resumable(checkpoint.read_index(path), config, corpus)
            return
        except DamagedError:
            if path == run.checkpoints[-1]:
                raise
