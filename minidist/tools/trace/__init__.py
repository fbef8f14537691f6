"""Traces of a run: a meter with a clock, one clock for all ranks, Chrome trace files."""
