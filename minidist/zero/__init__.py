"""ZeRO: optimizer states (stage 1), gradients (stage 2) and parameters (stage 3) sharded over data-parallel ranks.

Public: the functions of `build`. `minidist/simple/zero.py` is a whole implementation, shorter and with fewer options:
read it first. Then, in this order: `plan` (which parameters lie where in which flat parameter),
`flat_param` (its buffers and gradients), `reducer` (stages 1 and 2), `gather` (stage 3), `build` (Rajbhandari et al.
2020).
"""
