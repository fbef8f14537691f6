"""Side-by-side measurements of minidist and public systems. `python -m bench dp --ranks 2 --ranks 4`.

Every contender runs in the same processes, on equal weights and batches, with the same optimizer kernel, and must first
reproduce the numbers of one process. Then the contenders take turns, so that other load affects all of them equally.
"""
