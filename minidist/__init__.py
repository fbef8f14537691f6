"""minidist: a distributed trainer small enough to read, and the course that builds it."""

__version__ = "0.1.0"
