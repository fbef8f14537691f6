"""Course map, glossary and questions refer to existing pages only, and are complete."""

import json
import re
from pathlib import Path

import pytest

from exercises.catalogue import ROOT, Catalogue

FOLDER = ROOT / "chapters"
PAGES = ("README.md", "faq.md", "glossary.md")
MAP = (FOLDER / "README.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")
MIN_TERMS = 50
GLOSSARY_COLUMNS = 6  # term, meaning, PyTorch, Megatron-LM, DeepSpeed, Chinese
OWN_WORD_COLUMNS = 3  # term, meaning, Chinese


def anchors(notebook: Path) -> set[str]:
    """The headings of a notebook as JupyterLab names them in links."""
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for link in LINK.findall((FOLDER / page).read_text()):
        file, _, anchor = link.partition("#")
        assert (FOLDER / file).is_file(), link
        assert not anchor or anchor in anchors(FOLDER / file), link


def test_every_path_of_the_map_is_there():
    paths = re.findall(r"`((?:minidist|tests|bench|exercises)/[\w./]*)`", MAP)
    assert len(paths) > 20 and not [path for path in paths if not (ROOT / path).exists()]


def test_every_exercise_and_every_chapter_is_on_the_map_and_no_other():
    rows = [line.split("|") for line in MAP.splitlines() if line.count("|") == 6]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[4])}
    assert named == set(Catalogue())
    there = {file.parent.name for file in FOLDER.glob("*/chapter.toml")}
    assert there == {path.split("/")[0] for path in LINK.findall(MAP) if path.endswith(".ipynb")}


def test_each_exercise_is_in_a_row_of_its_chapter():
    for line in MAP.splitlines():
        if line.count("|") == 6:
            _, _, chapter, _, exercises, _, _ = line.split("|")
            for name in re.findall(r"`(\w+)`", exercises):
                assert Catalogue()[name].chapter[2:4] in chapter, line


def test_every_term_has_a_meaning_and_a_chinese_name_and_is_listed_once():
    rows = [
        line.strip().strip("|").split("|") for line in (FOLDER / "glossary.md").read_text().splitlines() if "|" in line
    ]
    rows = [[cell.strip() for cell in row] for row in rows if row[0].strip() != "term" and not row[0].startswith("---")]
    assert len(rows) >= MIN_TERMS and {len(row) for row in rows} == {GLOSSARY_COLUMNS, OWN_WORD_COLUMNS}
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in row[-1]) and row[1] for row in rows)
    assert len({row[0] for row in rows}) == len(rows)


def test_the_five_questions_are_answered():
    text = (FOLDER / "faq.md").read_text()
    assert [int(number) for number in re.findall(r"^## (\d)\. .+\?$", text, re.MULTILINE)] == [1, 2, 3, 4, 5]
    for answer in re.split(r"^## \d", text, flags=re.MULTILINE)[1:3]:
        assert ".ipynb#" in answer  # a measured cell
