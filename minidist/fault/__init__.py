"""Fault tolerance: errors that all ranks learn of, and graceful stops on signals. Checkpoints: `minidist.checkpoint`.

collective_errors  an error on one rank becomes an error on all ranks
signals     the request to stop, which takes effect at the end of a step
"""
