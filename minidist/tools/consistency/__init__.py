"""Consistency measured, in one process and on a virtual clock.

`clock` runs the workers and the server of `minidist.consistency.simple`, `virtual_run` trains a model with them, and
`delay` compares the largest stable learning rate of delayed gradient descent with theory.
"""
