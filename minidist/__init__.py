"""minidist: a distributed trainer small enough to read, and the course that builds it."""

from minidist.tools.shm.register import register_soon

__version__ = "0.1.0"

register_soon()  # torch is told of the backend "shm" when it is imported, which is not now
