"""The exercises of the course and what judges them: `python -m exercises`.

A learner writes in `work/`; the judge runs that file on fresh ranks, against tests that know the right values by
another way than the package does.
"""
