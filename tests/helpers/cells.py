"""Run notebook cells on live ranks, and check that the ranks can still communicate."""

import textwrap

from minidist.tools.notebook import LiveRanks

CELL_DEADLINE_S = 200.0  # far more than any cell takes: a result "deadline" means that a hang was not detected


def run_cell(live: LiveRanks, source: str, **options):
    result = live.run(textwrap.dedent(source), **{"timeout_s": CELL_DEADLINE_S, **options})
    assert result.kind != "deadline", str(result)
    assert len([*result.errors, *result.notes]) == 0 or len("\n".join(result.errors).splitlines()) < 15, str(result)
    return result


def assert_ranks_communicate(live: LiveRanks) -> None:
    """Check that the ranks communicate, through torch.distributed and through the package's collectives."""
    result = run_cell(
        live,
        """
        import minidist.comm
        t = torch.tensor([rank + 1.0])
        dist.all_reduce(t)
        minidist.comm.all_reduce(t, comm)
        t.item()
        """,
    )
    total = live.n**2 * (live.n + 1) / 2
    assert str(result) == f"ranks 0-{live.n - 1}: {total}"
