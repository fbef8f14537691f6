"""The folder of checkpoints. A checkpoint is complete if and only if its folder is named like `step-00000100`.

A checkpoint is written to `step-00000100.partial`, which is renamed when every byte is on disk. To delete a checkpoint,
its folder is first renamed to `.partial`, so a half-deleted folder never counts. There is no "latest" file: it could be
half written, or name a deleted checkpoint.

When a step is saved again, the old folder is named `step-00000100.replaced` between two renames. If the process dies
there, that folder is still complete and counts as the step's checkpoint.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from minidist.errors import RunError, UserError

_COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")
_PARTIAL = re.compile(r"step-\d{8,}(\.replaced)?\.partial")


def checkpoint_folder(root: Path, step: int, suffix: str = "") -> Path:
    """Return the path of the folder of the checkpoint of `step`, which need not exist.

    suffix: empty for a complete checkpoint; ".partial" for one that is being written; ".replaced" for an old one of the
    same step that a new one replaces.
    """
    return root / f"step-{step:08d}{suffix}"


def parse_step(folder: Path) -> int:
    """Return the step of a complete checkpoint from the name of its folder. Raises ValueError for another folder."""
    if (match := _COMPLETE.fullmatch(folder.name)) is None:
        raise ValueError(f"{folder} is not the folder of a complete checkpoint")
    return int(match[1])


def complete_checkpoints(root: str | Path) -> dict[int, Path]:
    """Return the complete checkpoints in `root` as {step: folder}, ascending; empty if `root` does not exist."""
    found: dict[int, Path] = {}
    for name in sorted(_list_names(Path(root))):  # `step-1` sorts before `step-1.replaced`: the plain name wins
        if (match := _COMPLETE.fullmatch(name)) and (folder := Path(root, name)).is_dir():
            found.setdefault(int(match[1]), folder)
    return dict(sorted(found.items()))


def unfinished_checkpoints(root: str | Path) -> list[Path]:
    """Return the folders in `root` of checkpoints whose save, or whose deletion, was interrupted; sorted by name."""
    return [Path(root, name) for name in sorted(_list_names(Path(root))) if _PARTIAL.fullmatch(name)]


def latest_checkpoint(root: str | Path, purpose: str = "resume from") -> Path:
    """Return the complete checkpoint with the highest step in `root`, or `root` itself if it is a checkpoint.

    purpose: a verb phrase for the error message "no checkpoint to <purpose>". Raises UserError, which lists what `root`
    contains, if there is no complete checkpoint.
    """
    root = Path(root)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise UserError(f"no checkpoint to {purpose}: {root} {what}. {_suggest_checkpoints(root.parent)}")
    if _PARTIAL.fullmatch(root.name):
        raise UserError(f"no checkpoint to {purpose}: {root} was never finished. {_suggest_checkpoints(root.parent)}")
    if _COMPLETE.fullmatch(root.name):
        return root
    if found := complete_checkpoints(root):
        return found[max(found)]
    names = sorted(_list_names(root))
    holds = f"holds no complete one, only {_format_names(names)}" if names else "is empty"
    never_finished = ", of which .partial was never finished" if any(map(_PARTIAL.fullmatch, names)) else ""
    below = [root / name for name in names if complete_checkpoints(root / name)]
    advice = _suggest_checkpoints(below[0]) if below else f"A checkpoint is a folder like step-00000100. {_ADVICE}"
    raise UserError(f"no checkpoint to {purpose}: {root} {holds}{never_finished}. {advice}")


def prune_checkpoints(
    root: str | Path, keep: int, just_saved: str | Path | None = None, keep_every: int = 0
) -> list[Path]:
    """Delete all but the latest `keep` complete checkpoints, and all unfinished ones; return the complete ones deleted.

    One rank calls it after a save. just_saved: the folder that `save_checkpoint` returned, which is kept even if `keep`
    checkpoints of later steps exist. keep_every: also keep the checkpoints of all steps divisible by it; 0: of none.
    Raises ValueError if keep < 1, RunError if the system refuses a deletion.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints; at least the one just written stays")
    root = Path(root)
    deleted = []
    try:
        for name in _list_names(root):
            if _PARTIAL.fullmatch(name) or (name.endswith(".replaced") and _replaced_is_stale(root / name)):
                _delete_checkpoint(root / name)
        steps = complete_checkpoints(root)
        for step in sorted(steps)[:-keep]:
            if keep_every and step % keep_every == 0:
                continue
            if just_saved is None or steps[step].resolve() != Path(just_saved).resolve():
                _delete_checkpoint(steps[step])
                deleted.append(steps[step])
    except OSError as error:
        raise RunError(f"an old checkpoint could not be deleted: {error}. The others in {root} are intact.") from error
    return deleted


def create_partial_folder(folder: Path) -> None:
    """Create the empty folder `folder`, deleting what an earlier attempt to save has left there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def commit_checkpoint(root: Path, step: int) -> Path:
    """Complete a checkpoint, whose files must be on disk: rename its `.partial` folder. Return the new path."""
    new, old = checkpoint_folder(root, step), checkpoint_folder(root, step, ".replaced")
    fsync_path(checkpoint_folder(root, step, ".partial"))
    if new.exists():
        if old.exists():
            _delete_checkpoint(old)
        os.rename(new, old)
    os.rename(checkpoint_folder(root, step, ".partial"), new)
    fsync_path(root)
    if old.exists():
        with contextlib.suppress(OSError):  # the new one is in place; a leftover does no harm
            _delete_checkpoint(old)
    return new


def _delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint's folder, renaming it first so that it stops counting as complete at once."""
    if not _PARTIAL.fullmatch(folder.name):
        aside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        folder = aside
    shutil.rmtree(folder, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_ADVICE = "Give a folder that holds one; minidist train writes them to runs/0001/checkpoints, for example."


def _replaced_is_stale(folder: Path) -> bool:
    """Whether the checkpoint that replaces `step-NAME.replaced` is complete, so that the old one can go."""
    return folder.with_suffix("").is_dir()


def _list_names(root: Path) -> list[str]:
    """Return the names of what a folder contains; [] if it does not exist."""
    return os.listdir(root) if root.is_dir() else []


def _format_names(names: list[str], limit: int = 4) -> str:
    """Return names for a message, at most `limit` of them."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _suggest_checkpoints(root: Path) -> str:
    """Return a sentence for an error message: the checkpoints in `root`, or where checkpoints are."""
    found = complete_checkpoints(root)
    return (
        f"{root} holds {_format_names([path.name for path in reversed(found.values())])}; give one of them."
        if found
        else _ADVICE
    )
