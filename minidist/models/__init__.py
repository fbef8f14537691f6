"""A decoder-only transformer without any parallelism code. Imports only torch and `minidist.hashing`.

Read in this order: `config`, `layers`, `transformer`, `dropout`, `init`.
"""
