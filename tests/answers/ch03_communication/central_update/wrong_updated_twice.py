"""the_root_updates_alone_and_once: two half steps, whose state counts two"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        for _ in range(2):
            update(parameters, gradient / 2)
    flat_broadcast(parameters, root, group)
