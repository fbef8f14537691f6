"""The chapters of the course, and the exercises of each."""

from pathlib import Path

import pytest

from exercises.catalogue import ROOT, Catalogue

CHAPTERS = sorted(file.parent for file in (ROOT / "chapters").glob("*/chapter.toml"))
CATALOGUE = Catalogue()
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda folder: folder.name)


def exercises_of(chapter: Path) -> list:
    """The exercises of a chapter, which is given as its folder."""
    return [exercise for exercise in CATALOGUE.values() if exercise.chapter == f"ch{chapter.name}"]
