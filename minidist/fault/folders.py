"""The folder of checkpoints. A checkpoint is complete when its folder is called `step-00000100`, and only then.

It is written in `step-00000100.partial` and renamed when every byte is on disk. There is no file that says which is the
latest: such a file can be half written, or outlive what it points to. A folder that is about to go is first renamed to
`.partial`, so one that is half deleted is never taken for a checkpoint.

Saving a step again moves the old folder to `step-00000100.replaced` for the moment between two renames; a process that
dies there leaves that one, whole, and it counts as the checkpoint of the step until the new one has the name.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from minidist.errors import RunError, UserError

_COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")
_PARTIAL = re.compile(r"step-\d{8,}(\.replaced)?\.partial")


def complete_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}.partial"


def replaced_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}.replaced"


def complete_checkpoints(root: str | Path) -> dict[int, Path]:
    """The complete checkpoints in `root`, step to folder, ascending. None when there is no such folder."""
    found: dict[int, Path] = {}
    for name in sorted(_entries(Path(root))):  # `step-1` sorts before `step-1.replaced`: the plain name wins
        if (match := _COMPLETE.fullmatch(name)) and (folder := Path(root, name)).is_dir():
            found.setdefault(int(match[1]), folder)
    return dict(sorted(found.items()))


def latest_checkpoint(root: str | Path, purpose: str = "resume from") -> Path:
    """The complete checkpoint with the highest step in `root`; `root` itself when it is one.

    purpose: what for, in the message. Raises UserError, which says what the folder does hold, when there is none.
    """
    root = Path(root)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise UserError(f"no checkpoint to {purpose}: {root} {what}. {_offer(root.parent)}")
    if _PARTIAL.fullmatch(root.name):
        raise UserError(f"no checkpoint to {purpose}: {root} was never finished. {_offer(root.parent)}")
    if _COMPLETE.fullmatch(root.name):
        return root
    if found := complete_checkpoints(root):
        return found[max(found)]
    names = sorted(_entries(root))
    unfinished = [name for name in names if _PARTIAL.fullmatch(name)]
    other = [name for name in names if name not in unfinished]
    holds = [
        f"{len(unfinished)} that {'was' if len(unfinished) == 1 else 'were'} never finished ({_some(unfinished)})",
        f"{len(other)} {'entry' if len(other) == 1 else 'entries'} that {'is' if len(other) == 1 else 'are'} "
        f"no checkpoint ({_some(other)})",
    ]
    holds = [text for text, some in zip(holds, (unfinished, other), strict=True) if some]
    below = [root / name for name in other if complete_checkpoints(root / name)]
    raise UserError(
        f"no checkpoint to {purpose}: {root} {'holds ' + ' and '.join(holds) if holds else 'is empty'}. "
        + (_offer(below[0]) if below else "A checkpoint is a folder like step-00000100. " + _ADVICE)
    )


def prune_checkpoints(root: str | Path, keep: int, written: str | Path | None = None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `keep`, and everything unfinished. One rank calls it, after `save`.

    written: the folder `save` returned; it stays even where there are `keep` later steps (of an abandoned run).
    Returns the complete checkpoints that went. Raises ValueError when keep < 1, RunError when the system refuses.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints; at least the one just written stays")
    root, gone = Path(root), []
    try:
        for name in _entries(root):
            if _PARTIAL.fullmatch(name) or (name.endswith(".replaced") and _replaced_is_stale(root / name)):
                delete_checkpoint(root / name)
        steps = complete_checkpoints(root)
        for step in sorted(steps)[:-keep]:
            if written is None or steps[step].resolve() != Path(written).resolve():
                delete_checkpoint(steps[step])
                gone.append(steps[step])
    except OSError as error:
        raise RunError(f"an old checkpoint could not be deleted: {error}. The others in {root} are intact.") from error
    return gone


def create_partial_folder(folder: Path) -> None:
    """Make an empty `.partial` folder, whatever an earlier attempt left there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def commit_checkpoint(root: Path, step: int) -> Path:
    """Give the partial folder of a step, whose files are on disk, its name. Returns the complete folder."""
    new, old = complete_folder(root, step), replaced_folder(root, step)
    fsync(partial_folder(root, step))
    if new.exists():
        if old.exists():
            delete_checkpoint(old)
        os.rename(new, old)
    os.rename(partial_folder(root, step), new)
    fsync(root)
    if old.exists():
        with contextlib.suppress(OSError):  # the new one is in place; a leftover does no harm
            delete_checkpoint(old)
    return new


def delete_checkpoint(folder: Path) -> None:
    """Delete a folder so that it stops counting as complete at once."""
    if not _PARTIAL.fullmatch(folder.name):
        aside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        folder = aside
    shutil.rmtree(folder, ignore_errors=True)


def fsync(path: Path) -> None:
    """Wait until the file's bytes, or the folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_ADVICE = "Give a folder that holds one; minidist train writes them to runs/0001/checkpoints, for example."


def _replaced_is_stale(folder: Path) -> bool:
    return folder.with_suffix("").is_dir()


def _entries(root: Path) -> list[str]:
    return os.listdir(root) if root.is_dir() else []


def _some(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _offer(root: Path) -> str:
    found = complete_checkpoints(root)
    return (
        f"{root} holds {_some([path.name for path in reversed(found.values())])}; give one of them."
        if found
        else _ADVICE
    )
