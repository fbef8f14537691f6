"""minidist: a distributed trainer small enough to read, and the course that builds it.

The core, everything outside `minidist.tools`, is what a reader reads to understand distributed training. It never
imports a tool. Public: `comm.World` and `comm.bind`, `config.Config`, `parallelize.parallelize`, `train.engine.Engine`,
`train.trainer.train`. Read in this order:

    mesh, parameters, config, errors       the ground: the grid of ranks, facts about parameters, settings
    comm                                   groups, collectives, the meter
    models, data                           the model and its batches; neither knows of parallelism
    parallel.data, .tensor, .pipeline, .context
    zero, precision, recompute, compile    sharded model states, dtypes, activation recomputation
    checkpoint, fault                      checkpoints of any layout; errors on some ranks, signals
    process_groups, validation             which groups a run needs; which runs cannot work
    parallelize                            all of it composed, in one fixed order
    train                                  one step, then a whole run

`minidist.tools` holds what surrounds it: launcher, shared-memory backend, deadlock detection, traces, memory
measurements, estimates, parity, notebooks and the command line.
"""

__version__ = "0.1.0"
