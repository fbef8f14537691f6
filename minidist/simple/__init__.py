"""The simple trainer: what the course builds, and what a reader reads first. `minidist train --engine simple` runs it.

Every axis on one mesh, ZeRO 1 to 3, mixed precision, recomputation, local SGD and DiLoCo, checkpoints that any layout
and both engines load, repair of replicas. It equals one process in every layout (`minidist parity --engine simple`) and
refuses in one sentence each what it leaves out. It imports nothing of the fast trainer.

Read in this order:

    data_parallel       broadcast, count of tokens, gradient reducers: naive and bucketed
    tensor_parallel     region operators, attention, MLP, embedding and loss over a sharded vocabulary
    pipeline            GPipe and 1F1B as lists of actions, and the executor that runs them
    context_parallel    ring attention forward and backward, zig-zag, Ulysses
    zero                flat parameters; stages 1, 2 and 3
    mixed_precision     masters, loss scaling, one decision of all ranks; recompute: activation recomputation
    parallelize         all of it in one fixed order; who holds which box of which parameter
    engine              one training step
    consistency         replicas that differ: servers, local SGD, DiLoCo
    checkpoint          atomic save, load in any layout; training_state: what a checkpoint contains
    recovery            replicas compared bit by bit, and repaired
    trainer             the run
    collectives         all-reduce from send and receive: tree, ring, halving and doubling
"""
