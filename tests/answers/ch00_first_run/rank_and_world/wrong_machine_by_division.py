"""every_rank_of_three_machines: the machine is computed as if all machines had equally many ranks"""

from minidist.errors import UserError
from minidist.tools.launch.environment import Place

DEFAULTS = {
    "RANK": None,
    "WORLD_SIZE": None,
    "LOCAL_RANK": "RANK",
    "LOCAL_WORLD_SIZE": "WORLD_SIZE",
    "GROUP_RANK": None,
}


def rank_and_world(environ):
    numbers = {}
    for name, default in DEFAULTS.items():
        text = environ.get(name, environ.get(default, "0" if name == "GROUP_RANK" else ""))
        if not text.isdecimal():
            raise UserError(f"{name} must be a whole number, and is {text!r}")
        numbers[name] = int(text)
    rank, size, local_rank, local_size, _ = numbers.values()
    if not (rank < size and local_rank < local_size <= size):
        raise UserError(f"these numbers do not fit together: {numbers}")
    return Place(rank, size, local_rank, local_size, rank // local_size)
