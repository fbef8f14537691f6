"""divides_evenly: The package's function, called in a thread, below which no line of the file stands."""

from concurrent.futures import ThreadPoolExecutor

from minidist.data import partition


def block(n, world_size, rank):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(partition.block, n, world_size, rank).result()
