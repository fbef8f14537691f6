"""Fault-tolerant training as simply as possible: data parallelism only, saves that block, one sample per micro-batch.

Read in this order; the numbers are the sections of chapter 07. Each file is one idea and names its fast version.

checkpoint  save, load          7.1, 7.2  a checkpoint is whole or absent after a crash, and any layout loads it
run         Run, resume         7.3       everything that decides the next step: the resumed run is the same run
interval    best_interval_s     7.4       how often to save
agreement   train_step          7.5       all ranks update, or none
            differing_replicas  7.6       which replica differs from the others, and in which tensor
recovery    recover, train      7.7       the loop that survives the death of ranks, without a restart
"""
