"""Side-by-side measurements of minidist and public systems. `python -m bench dp --ranks 2 --ranks 4`.

Every contender runs in the same processes, on equal weights and equal batches, with the same optimizer kernel, and must
first produce the numbers of one process. Then they take turns: what the machine does besides hits all of them alike.
"""
