"""Aligned text tables and rounded numbers with unit prefixes."""

from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{name:<{widths[0]}}  {line}".rstrip())


def format_si(number: float, unit: str = "") -> str:
    """Format a number with three significant digits and a decimal prefix: "1.23 MB" for 1234567 and the unit "B"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} P{unit}"
