"""Context parallelism: every sequence sharded over the ranks of one group; only attention communicates.

Public: the functions of `split`. Read in this order: `chunks` and `layout` (which positions a rank holds), `causal`,
`kernels` (attention over a block of keys), `ring` and `ulysses`, `split`. The short version is
`minidist.simple.context_parallel`.
"""
