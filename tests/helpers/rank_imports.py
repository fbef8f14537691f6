"""Which modules ranks import while they run the tests of an exercise: each of up to 22 ranks would do it again."""

import json
import os
import sys

from exercises import rank_tests

FOLDER = "FOLDER_OF_RANK_IMPORTS"  # the environment variable with the folder into which ranks write


def run_tests_and_note_imports(world, request: rank_tests.Request) -> str:
    """In place of `rank_tests.run_tests`: also write the names of the modules that this rank has imported to a file."""
    before = set(sys.modules)
    try:
        return rank_tests.run_tests(world, request)
    finally:
        with open(f"{os.environ[FOLDER]}/{world.size}-{world.rank}", "w") as file:
            json.dump(sorted(set(sys.modules) - before), file)
