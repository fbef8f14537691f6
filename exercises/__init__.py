"""The exercises of the course and their grader: `python -m exercises`.

A learner writes in `work/`. The grader runs that file on fresh ranks against tests that compute the right values
independently of the package. In a notebook, `%load_ext exercises` gives `%exercise` and `%check`.

Reading order: `catalogue` (what an exercise consists of), `work` (the learner's files), `attempt` and `check` (grade
a file), `diagnosis` and `rank_tests` (run its tests, on the client and on a rank), `scratch` (the files that both
share), `report` (messages). For the authors of tests: `testing`, `network`, `traffic`, `observations`,
`expected_shards`, `pipeline`. Protection of the grader: `source_check` and `guard`; `stuck_ranks` grades predictions.
To grade a class: `submissions`, `sandbox` and `sandbox_process` inside it, `grade`, `class_report` and `made_class`;
to give the course to students: `release` and `gradescope`. For the authors of exercises: `new`, `stubs`, `answers`
and `generated_answers`, `gate`, and `mutate` with `mutants` and `mutation_operators`. For learners: `magics`,
`exercise_display`, `watch`, `jupyterlab`, and `train`, which trains with the learner's code: `learner_pieces` in one
of the `layouts`, which `parity` compares with one process; `train_in_notebook` does so beside the package's code.
"""


def load_ipython_extension(shell) -> None:
    """Register the magics: IPython calls this for `%load_ext exercises`."""
    from exercises.magics import ExerciseMagics  # IPython is needed from here on only

    shell.extension_manager.load_extension("minidist.tools.notebook")  # nothing when it is loaded
    shell.register_magics(ExerciseMagics(shell, shell.magics_manager.registry["RanksMagics"]))
