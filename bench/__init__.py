"""Benchmarks of minidist against other training libraries: `python -m bench dp --ranks 2 --ranks 4`.

All contenders of a benchmark run in the same processes, with the same initial weights, batches and optimizer kernel.
Each contender must first reproduce the loss and gradients of a single process. Then the benchmark runs in rounds: in
every round each contender takes one turn of a few training steps, so that other load on the machine affects all
contenders equally.

Reading order: `workload` (model, batches, optimizer), `contenders` and the files of baselines, `time_contenders` (what
runs on each rank), `compare_contenders` (launch and ratios), `bootstrap` (confidence intervals), `peak_memory`. Each
`compare_*` module with a `main` is one command.
"""
