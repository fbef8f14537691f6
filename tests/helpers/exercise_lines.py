"""How many lines a learner writes in each exercise: `python -m tests.helpers.exercise_lines`.

Lines of the solution in place of the stub's blanks, without comments and empty lines; 0 for predictions and debugging
exercises, whose answer is not a number of lines. Signatures and docstrings, which are given, do not count.
"""

from exercises import stubs
from exercises.catalogue import Catalogue, Exercise

SIZES = (1, 10, 15)


def lines_to_write(exercise: Exercise) -> int:
    """Return the number of lines of code that the solution has in the blanks of a piece or script."""
    if exercise.kind in ("predict", "debug"):
        return 0
    found = [
        (source, lines)
        for change in exercise.changes
        for source in stubs._sources(exercise)
        if (lines := stubs._lines_of(change, source))
    ]
    blanks = [line.strip() for source, (first, last) in found for line in source.splitlines()[first : last + 1]]
    return sum(bool(line) and not line.startswith("#") for line in blanks)


if __name__ == "__main__":
    counted = [(exercise, lines_to_write(exercise)) for exercise in Catalogue().values()]
    for exercise, lines in counted:
        print(f"{exercise.section:<5}{exercise.name:<28}{exercise.kind:<8}{lines:3} lines {exercise.minutes:3} minutes")
    minutes = sum(exercise.minutes for exercise, _ in counted)
    for size in SIZES:
        these = sum(exercise.minutes for exercise, lines in counted if lines >= size)
        print(f"{these:5} of {minutes} minutes ({these / minutes:.0%}) in exercises of at least {size} lines")
