"""`python -m exercises watch`: judge a file when it is saved, and go on to the next exercise when it passes."""

import os
import time
from collections.abc import Callable, Iterator

from exercises.attempt import attempt
from exercises.catalogue import Catalogue, Exercise
from exercises.work import Work
from minidist.errors import UserError
from minidist.tools.launch import RankServer

_LOOK_S = 0.1

# When a file was written, how long it is, and which one it is: editors write another and rename it.
Stamp = tuple[int, int, int]


class Watcher:
    """The learner's files and what has become of them; `step` looks once.

    name: the exercise to begin with; the first that is not passed when None. say: where reports go.
    Raises UserError when the learner has no files, or no exercise is left.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        work: Work,
        server: RankServer,
        name: str | None = None,
        say: Callable[[str], None] = print,
    ):
        self._catalogue, self._work, self._server, self._say = catalogue, work, server, say
        self._judged = dict(self._stamps())
        self._written = dict(self._judged)  # as the last look saw them
        if not self._judged:
            raise UserError(f"there is no file in {work.folder}; python -m exercises start copies the stubs there")
        self.current = catalogue[name] if name else self._unsolved()
        if self.current is None:
            raise UserError("you have passed every exercise; to watch one all the same, name it")
        self._tell()

    def step(self) -> list[Exercise]:
        """Judge what was saved since the last time and is not being written any more; returns those exercises."""
        now, before = dict(self._stamps()), self._written
        self._written = now
        settled = [n for n, stamp in now.items() if stamp == before.get(n) and stamp != self._judged.get(n)]
        for name in settled:
            self._judged[name] = now[name]
            self._judge(self._catalogue[name])
        return [self._catalogue[name] for name in settled]

    def run(self) -> None:
        """Look until Ctrl-C."""
        try:
            while True:
                self.step()
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            self._say("")

    def _judge(self, exercise: Exercise) -> None:
        try:
            verdict, text = attempt(exercise, self._work, self._server)
        except UserError as error:  # taken away again
            self._say(str(error))
            return
        self._say(f"\n{text}")
        if verdict.passed and (exercise is self.current or self._passed(self.current)):
            self.current = self._unsolved() or exercise
            if self.current is exercise:
                self._say("\nyou have passed every exercise")
            else:
                self._say("")
                self._tell()

    def _tell(self) -> None:
        exercise = self.current
        told = f"next: {exercise.section} {exercise.title} ({exercise.points} points, {exercise.minutes} minutes)"
        self._say(f"{told}\nsave {self._work.file(exercise)} to have it judged; Ctrl-C ends")

    def _unsolved(self) -> Exercise | None:
        return next((exercise for exercise in self._catalogue.values() if not self._passed(exercise)), None)

    def _passed(self, exercise: Exercise) -> bool:
        return bool(self._work.entry(exercise).get("passed"))

    def _stamps(self) -> Iterator[tuple[str, Stamp]]:
        for name, exercise in self._catalogue.items():
            try:
                seen = os.stat(self._work.file(exercise))
            except OSError:
                continue
            yield name, (seen.st_mtime_ns, seen.st_size, seen.st_ino)
