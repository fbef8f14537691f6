"""Cells of live ranks in tests: run one that must not take long, see whether the ranks still work."""

import textwrap

from minidist.tools.notebook import LiveRanks

LATER_S = 200.0  # a cell that should have been explained before fails as "deadline"


def run(live: LiveRanks, source: str, **options):
    result = live.run(textwrap.dedent(source), **{"timeout_s": LATER_S, **options})
    assert result.kind != "deadline", str(result)
    assert len([*result.errors, *result.notes]) == 0 or len("\n".join(result.errors).splitlines()) < 15, str(result)
    return result


def works(live: LiveRanks) -> None:
    """The ranks talk to each other, through torch's calls and through the package's collectives."""
    result = run(
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
