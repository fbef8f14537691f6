"""ZeRO: optimizer states (stage 1), gradients (stage 2) and parameters (stage 3) sharded over data-parallel ranks.

Public: the functions of `build`. Read in this order: `layout` (parameters in a flat buffer), `flat_param`, `gradients`,
`reducer` (stages 1 and 2), `grouping` and `blocks` (stage 3), `build` (Rajbhandari et al. 2020).
"""
