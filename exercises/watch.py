"""`python -m exercises watch`: grade a file whenever it is saved, and announce the next exercise when it passes."""

import os
import time
from collections.abc import Callable, Iterator

from exercises.attempt import grade_attempt
from exercises.catalogue import Catalogue, Exercise
from exercises.work import Work
from minidist.errors import UserError, format_count
from minidist.tools.launch import RankServer

_POLL_S = 0.1

# Modification time, size and inode of a file: editors write a new file and rename it.
Stamp = tuple[int, int, int]


class Watcher:
    """Watches the learner's files and grades those that change; `step` polls once.

    name: the exercise to begin with; None: the first that is not passed. show: prints a report.
    Raises UserError if the learner has no files or has passed every exercise.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        work: Work,
        server: RankServer,
        name: str | None = None,
        show: Callable[[str], None] = print,
    ):
        self._catalogue, self._work, self._server, self._show = catalogue, work, server, show
        self._graded = dict(self._file_stamps())
        self._last_stamps = dict(self._graded)  # at the last poll
        if not self._graded:
            raise UserError(f"there is no file in {work.folder}; python -m exercises start copies the stubs there")
        self.current = catalogue[name] if name else work.next_exercise(catalogue)
        if self.current is None:
            raise UserError("you have passed every exercise; to watch one all the same, name it")
        self._announce_current()

    def step(self) -> list[Exercise]:
        """Grade the files saved since the last poll whose writing is complete; return their exercises."""
        now, before = dict(self._file_stamps()), self._last_stamps
        self._last_stamps = now
        complete = [n for n, stamp in now.items() if stamp == before.get(n) and stamp != self._graded.get(n)]
        for name in complete:
            self._graded[name] = now[name]
            self._grade(self._catalogue[name])
        return [self._catalogue[name] for name in complete]

    def run(self) -> None:
        """Poll until Ctrl-C."""
        try:
            while True:
                self.step()
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self._show("")

    def _grade(self, exercise: Exercise) -> None:
        """Grade a file and show the report; go on to the next exercise if it has passed."""
        try:
            verdict, text = grade_attempt(exercise, self._work, self._server)
        except UserError as error:  # the file has been removed
            self._show(str(error))
            return
        self._show(f"\n{text}")
        if verdict.passed and (exercise is self.current or self._is_passed(self.current)):
            self.current = self._work.next_exercise(self._catalogue) or exercise
            if self.current is exercise:
                self._show("\nyou have passed every exercise")
            else:
                self._show("")
                self._announce_current()

    def _announce_current(self) -> None:
        """Show the exercise to do next and its file."""
        exercise = self.current
        size = f"{format_count(exercise.points, 'point')}, {format_count(exercise.minutes, 'minute')}"
        text = f"next: {exercise.section} {exercise.title} ({size})"
        self._show(f"{text}\nsave {self._work.file(exercise)} to check it; Ctrl-C ends")

    def _is_passed(self, exercise: Exercise) -> bool:
        """Return whether the learner has passed an exercise."""
        return bool(self._work.entry(exercise).get("passed"))

    def _file_stamps(self) -> Iterator[tuple[str, Stamp]]:
        """Yield (exercise, stamp) for each of the learner's files; a stamp changes when the file is saved."""
        for name, exercise in self._catalogue.items():
            try:
                seen = os.stat(self._work.file(exercise))
            except OSError:
                continue
            yield name, (seen.st_mtime_ns, seen.st_size, seen.st_ino)
