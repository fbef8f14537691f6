"""Live recovery: when a rank dies the others go on, with the training state from their memory, and admit a new rank.

Read in this order: `membership` (which processes are the ranks, agreed in a store), `replicas` (the state in the memory
of the ranks, and loading it from there), `live_recovery` (the loop around the trainer).
"""
