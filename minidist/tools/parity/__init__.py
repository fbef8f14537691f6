"""`minidist parity`: compares every layout with one process: loss, gradients, gradient norm and parameters.

Read in this order: `reference` (the loop of one process) and `muon`; `layouts` and `cases` (what is compared), `probe`
(the model), `cover` and `plan` (which cases run), `names` (a case by its name); `compare` and `ranks` (what runs on the
ranks), `run` (one row per case), `command`.
"""
