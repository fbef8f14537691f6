"""The backend `shm`: collectives and transfers between the processes of one Linux machine, in pure Python.

    import minidist.tools.shm               # registers the backend with torch
    import torch.distributed as dist
    dist.init_process_group("shm")          # everything built on torch.distributed then runs on it

**Terms.** A *group* is a process group of torch; a *group rank* is a rank's index in it. An *operation* is a collective
or a *transfer*: one send or one receive. Its *signature* is the operation, dtype and size as text, which the ranks
compare before they exchange data.

**Memory.** Every process makes one *arena* of 8 MiB: anonymous shared memory, which disappears with the last process
that maps it. Its file descriptor travels over a socket, so all processes of a job can map all arenas. A group leases
three *slots* in the arena of each of its ranks; larger tensors stream through the slots in chunks that fit the cache. A
group that finds little free memory leases temporary slots for each large tensor. A rank writes only to its own slots,
and to the slices of the first rank's slots that it has reduced.

**Synchronisation.** No flag in shared memory tells another process or thread that data is ready. Every hand-over goes
through the kernel, whose locks order the writes before it and the reads after it, on Arm too:

    ==================================================  ===========================================================
    transferred                                         by
    ==================================================  ===========================================================
    a filled slot, to the other ranks of the group      `exchange`: a message to each rank, one from each (send / recv)
    a reduced slice of a slot                           the next `exchange`                       (send / recv)
    a slot that all ranks have read, to its owner       the `exchange` after the reading          (send / recv)
    temporary slots, to the next group that uses them   the `exchange` after the last reading     (send / recv)
    a chunk of a transfer, to the receiver              the message with its offset               (send / recv)
    a chunk that was read, to the sender                the receiver's answer                     (send / recv)
    a small transfer                                    is part of the message                    (send / recv)
    a block of a destroyed group, to the arena          end of file on the group's sockets        (shutdown / recv)
    an operation, to a worker thread                    put and get of a `queue.SimpleQueue`          (a lock, futex)
    the end of an operation, to a waiting thread        release of a lock that the waiter acquires (a lock, futex)
    a new connection, to the thread that waits for it   `threading.Condition`                     (a lock, futex)
    the end of a process                                its process descriptor becomes readable   (poll)
    ==================================================  ===========================================================

**Waiting** is a `recv` or the acquisition of a lock. It sleeps in the kernel after at most 0.1 ms of polling, during
which it yields the core. **Order** is kept per queue: the collectives of a group share one queue, each (peer,
direction, tag) has its own. Queues share no lock while they wait. An operation runs in the thread that waits for it
if it is the next of its queue, else in a worker thread.

**Sums** are taken in rank order for every element, whatever the chunks.

Reading order: `register` (torch learns of the backend), `group_creation` (ranks connect, or fall back to gloo), `group`
(torch's interface), `work` and `operation_queue` (order and threads), `group_resources` (connections and memory of a
group), `collectives` and `slots` (the algorithms), `transfer` (send and receive), `barrier` (message exchange and error
messages), `process_context` (sockets, and peers that end), `arena` (the memory), `gpu` and `host_staging` (tensors on
GPUs).
"""

from minidist.tools.shm.register import register_backend

register_backend()
