"""divides_evenly: The package's function under its own name."""

from minidist.data.partition import block  # noqa: F401
