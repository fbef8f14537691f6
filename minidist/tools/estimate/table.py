"""Numbers for people, in columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{name:<{widths[0]}}  {line}".rstrip())


def scaled(number: float, unit: str = "") -> str:
    """Three digits and a power of 1000: 1.23 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} P{unit}"
