"""Fault tolerance: errors that all ranks learn of, and graceful stops on signals. Checkpoints: `minidist.checkpoint`.

simple      the whole idea in five short files: data parallelism, saves that block, recovery without a restart
disk        the folder on disk as the few operations whose order decides what survives a crash
collective_errors  an error on one rank becomes an error on all ranks
signals     the request to stop, which takes effect at the end of a step
"""
