"""The one door to the network: nothing outside this folder calls torch.distributed.

`bind` makes the groups of a mesh, the door's operations move tensors through them, the meter counts every byte, the
board says where each rank stands, and the watchdog turns a deadlock into a sentence.
"""

from minidist.comm.control import exchange, gather_objects
from minidist.comm.door import (
    CommError,
    Handle,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    batch,
    broadcast,
    recv,
    reduce_scatter,
    send,
)
from minidist.comm.group import Group, Groups, Use, bind
from minidist.comm.meter import Meter, Record
from minidist.comm.world import World

__all__ = [
    "CommError",
    "Group",
    "Groups",
    "Handle",
    "Meter",
    "Record",
    "Transfer",
    "Use",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch",
    "bind",
    "broadcast",
    "exchange",
    "gather_objects",
    "recv",
    "reduce_scatter",
    "send",
]
