"""Status pages written by hand."""

from minidist.comm.status import Channel
from minidist.tools.deadlock.status_page import StatusPage

GRADS = Channel("collective", "grads", (0, 1, 2))


def waiting(page, channel, name="all_reduce", shape=(4,), dtype="float32", where="train.py:7"):
    seq = page.launch(channel, name, shape, dtype)
    page.wait(channel, seq, name, shape, dtype, where)
    return page


def snapshots(**pages):
    return {int(name[1:]): page.snapshot() for name, page in pages.items()}


def returned(page=None):
    page = page or StatusPage()
    page.finish("returned")
    return page
