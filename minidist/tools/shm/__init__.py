"""The backend `shm`: collectives and transfers between the processes of one Linux machine, in pure Python.

    import minidist.tools.shm               # registers the backend with torch
    import torch.distributed as dist
    dist.init_process_group("shm")          # everything built on torch.distributed then runs on it

**Memory.** Every process makes one *arena* of 8 MiB: anonymous memory that no name leads to and that is gone with its
last user. Its file descriptor travels over a socket, so all processes of a job see all arenas. A group leases three
slots from the arena of each of its ranks; a larger tensor streams through them in chunks that stay in cache. A group
that finds little left to lease borrows more for each large tensor. A rank writes its own slots, and of the first rank's
the slices that it has reduced.

**Hand-overs.** No plain store tells another process, or another thread, that something is ready. The kernel orders what
was written before a message with what is read after it (sending and receiving take the queue's lock), on Arm too:

    ==========================================  ===========================================================
    what is handed over                         by
    ==========================================  ===========================================================
    a filled slot, to the others of the group   `meet`: a message to each, one from each      (send / recv)
    a reduced slice of a slot                   the next `meet`                               (send / recv)
    a slot that all have read, to its owner     the `meet` after the reading                  (send / recv)
    borrowed slots, to who borrows them next    the `meet` after the last reading             (send / recv)
    a piece of a transfer, to the receiver      the message that says where it lies           (send / recv)
    a piece that was read, to the sender        the receiver's answer                         (send / recv)
    a small transfer                            lies in the message itself                    (send / recv)
    a block of a group that was destroyed       end of file on its sockets           (shutdown / recv)
    an operation, to a worker thread            `SimpleQueue.put` and `get`                   (a lock, futex)
    the end of an operation, to who waits       release of a lock that the waiting acquires   (a lock, futex)
    a new connection, to who needs it           `threading.Condition`                         (a lock, futex)
    the death of a process                      its process descriptor becomes readable       (poll)
    ==========================================  ===========================================================

**Waiting** is a `recv` or the acquisition of a lock: it sleeps in the kernel, at the latest after a tenth of a
millisecond in which others were given way to. **Order** is kept per *lane*: the
collectives of a group are one, each (peer, direction, tag) another. Lanes share no lock while they wait. A lane's
operation runs in the thread that waits for it when nothing is before it, else in a worker thread.

**Sums** are taken in the order of the ranks at every element, whatever the chunks are.

Files: `register` tells torch; `arena` is the memory; `neighbours` the sockets and who lives; `meeting` the rendezvous
of a group and its error messages; `slots` and `collectives` the algorithms; `transfer` send and receive; `lane` order
and threads; `group` torch's interface; `gpu` and `staged` what becomes of tensors on GPUs;
`start` how the ranks find each other, and when it is gloo instead.
"""

from minidist.tools.shm.register import register_soon

register_soon()
