"""Data: which rank trains on which samples.

Public: `corpus.open_corpus`, `loader.Loader`, the functions of `partition`. Read in this order: `partition`, `loader`,
`corpus`, `documents`, `synthetic`. Nothing here communicates.
"""
