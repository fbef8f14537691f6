"""the_root_updates_alone_and_once: every rank needs the optimizer's state"""

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce


def central_update(parameters, gradient, update, group, root=0, op="sum"):
    total = gradient.clone()
    flat_reduce(total, root, group, op)
    flat_broadcast(total, root, group)
    flat_broadcast(parameters, root, group)
    update(parameters, total)
