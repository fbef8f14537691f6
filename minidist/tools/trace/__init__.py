"""`minidist train --trace FILE`: a timeline of some steps on every rank, as a Chrome trace file.

Read in this order: `timed_meter` (what is recorded), `clock` (one clock for all ranks), `chrome` (the file format),
`trace` (the observer that records, gathers and writes), `intervals` and `traffic` (figures derived from recordings).
"""
