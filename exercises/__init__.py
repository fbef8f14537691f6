"""The exercises of the course and what judges them: `python -m exercises`.

A learner writes in `work/`; the judge runs that file on fresh ranks, against tests that know the right values by
another way than the package does. In a notebook, `%load_ext exercises` gives `%exercise` and `%check`.
"""


def load_ipython_extension(shell) -> None:
    """What `%load_ext exercises` does."""
    from exercises.magics import ExerciseMagics  # IPython is needed from here on only

    shell.extension_manager.load_extension("minidist.tools.notebook")  # nothing when it is loaded
    shell.register_magics(ExerciseMagics(shell, shell.magics_manager.registry["RanksMagics"]))
