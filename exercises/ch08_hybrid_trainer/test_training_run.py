from exercises.testing import test


@test(points=26)
def placeholder(answer, world, network):
    """x"""
