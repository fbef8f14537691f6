"""The stored notebooks: cells equal the package's code, and every chapter obeys the rules for chapters."""

import ast
import base64
import io
import re
import tomllib
from functools import cache
from pathlib import Path

import nbformat
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from exercises.catalogue import ROOT
from minidist.errors import UserError
from minidist.tools.notebook import weave
from minidist.tools.notebook.predict import HOW
from tests.helpers.chapters import CHAPTERS, each_chapter, exercises_of

MIN_OBSERVED = 5  # predictions whose value a run gave, in each notebook
MAX_IGNORED = 0.2
MIN_COLOUR = 0.2  # between the strongest and the weakest of red, green and blue
MIN_COLOURED = 0.001
IGNORED = {"nbval-ignore-output", "nbval-skip", "nbval-raises-exception"}
READ_LATER = re.compile(r"^\| `(minidist[\w.]*:\w+)` \| (.+) \|$", re.MULTILINE)


@cache
def notebooks(chapter: Path) -> list:
    found = [nbformat.read(file, as_version=4) for file in sorted(chapter.glob("*.ipynb"))]
    assert found
    return found


def code_cells(chapter: Path) -> list:
    return [cell for notebook in notebooks(chapter) for cell in notebook.cells if cell.cell_type == "code"]


def public_symbols(module: str) -> set[str]:
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {f"{module}:{name}" for name in names if not name.startswith("_")}


def exercise_pieces(chapter: Path) -> set[str]:
    return {piece for one in exercises_of(chapter) if one.kind == "piece" for piece in (*one.also, one.piece)}


@each_chapter
def test_piece_cells_are_the_package(chapter):
    for notebook in notebooks(chapter):
        assert list(weave.find_piece_cells(notebook)) and not weave.find_stale_piece_cells(notebook), "make weave"


@each_chapter
def test_every_public_symbol_of_a_chapter_is_a_cell_an_exercise_or_read_later(chapter):
    chapter_file = tomllib.loads((chapter / "chapter.toml").read_text())
    symbols = set().union(*map(public_symbols, chapter_file["modules"]))
    cells = {name for notebook in notebooks(chapter) for _, name, _ in weave.find_piece_cells(notebook)}
    later = {
        name: reason
        for notebook in notebooks(chapter)
        for cell in notebook.cells
        for name, reason in READ_LATER.findall(cell.source)
    }
    assert symbols == (cells | exercise_pieces(chapter) | later.keys()) & symbols
    assert later.keys() <= symbols, "read later: not a symbol of this chapter"
    assert not later.keys() & (cells | exercise_pieces(chapter)), "read later, although a cell or an exercise shows it"
    assert all(len(reason) > 5 for reason in later.values())


@each_chapter
def test_the_cell_of_a_solution_is_collapsed_and_comes_once_after_all_exercises(chapter):
    pieces = exercise_pieces(chapter)
    places = {piece: [] for piece in pieces}
    for notebook in notebooks(chapter):
        opened = [i for i, cell in enumerate(notebook.cells) if cell.source.startswith("%exercise ")]
        for i, name, _ in weave.find_piece_cells(notebook):
            if name in pieces:
                folded = notebook.cells[i].metadata.get("jupyter", {}).get("source_hidden")
                places[name].append(bool(folded) and i > max(opened))
    assert all(found == [True] for found in places.values()), places


@each_chapter
def test_every_exercise_is_opened_once_in_its_chapter(chapter):
    opened = [cell.source.split()[1] for cell in code_cells(chapter) if cell.source.startswith("%exercise ")]
    assert sorted(opened) == sorted(exercise.name for exercise in exercises_of(chapter))


@each_chapter
def test_every_exercise_has_a_cell_that_grades_it_beside_it(chapter):
    for notebook in notebooks(chapter):
        sources = [cell.source for cell in notebook.cells]
        for source, following in zip(sources, [*sources[1:], ""], strict=True):
            if source.startswith("%exercise "):
                assert following == source.replace("%exercise", "%check"), source


@each_chapter
def test_every_notebook_trains_with_the_answers_that_the_trainer_calls(chapter):
    routed = [one.name for one in exercises_of(chapter) if one.is_trained]
    for notebook in notebooks(chapter):
        opened = [cell.source.split()[1] for cell in notebook.cells if cell.source.startswith("%exercise ")]
        trained = [cell.source.split()[1:] for cell in notebook.cells if cell.source.startswith("%train ")]
        wanted = [name for name in opened if name in routed]
        assert trained == [wanted] * bool(wanted)


@each_chapter
def test_every_prediction_is_asked_before_its_measurement(chapter):
    asked, answered = [], []
    for cell in code_cells(chapter):
        answered += re.findall(r'^score_prediction\("([\w-]+)"', cell.source, re.MULTILINE)
        asked += re.findall(r'^predict\(\s*"([\w-]+)"', cell.source, re.MULTILINE)
        assert set(answered) <= set(asked), cell.source
        assert "\npredict(" not in f"\n{cell.source}" or "answer=None" in cell.source, cell.source
    assert asked == answered and len(set(asked)) == len(asked)


@each_chapter
def test_the_value_of_every_prediction_is_shown_with_how_it_was_had(chapter):
    for cell in code_cells(chapter):
        if re.search(r"^score_prediction\(", cell.source, re.MULTILINE):
            shown = [output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            assert any(f"\n{how}: " in text for text in shown for how in HOW), cell.source


def count_observed_predictions(notebook) -> int:
    """The number of calls of `score_prediction` in a notebook whose value was observed, which is the default."""
    labels = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and re.search(r"^score_prediction\(", cell.source, re.MULTILINE):
            code = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
            calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
            scores = [call for call in calls if ast.unparse(call.func) == "score_prediction"]
            given = [{keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords} for call in scores]
            labels += [each.get("how", repr(HOW[0])) for each in given]
    return labels.count(repr(HOW[0]))


@each_chapter
def test_every_notebook_has_five_predictions_whose_value_is_observed(chapter):
    files = sorted(chapter.glob("*.ipynb"))
    counts = {file.name: count_observed_predictions(each) for file, each in zip(files, notebooks(chapter), strict=True)}
    few = [f"{name} has {count}" for name, count in counts.items() if count < MIN_OBSERVED]
    assert not few, f"at least {MIN_OBSERVED} predictions of a notebook must be observed in a run: {', '.join(few)}"


def test_counted_and_computed_values_are_not_observed():
    source = """
score_prediction("a", ranks.last)
score_prediction("b", f(2), how="observed")
score_prediction("c", sent[0], how="counted")
score_prediction("d", 3 * (1 + 2), how="computed")
"""
    assert count_observed_predictions(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])) == 2


def test_names_of_predictions_are_unique_among_all_chapters():
    """Answers of all chapters are kept in one file, by that name."""
    code = [cell.source for chapter in CHAPTERS for cell in code_cells(chapter)]
    asked = [id for source in code for id in re.findall(r'^predict\(\s*"([\w-]+)"', source, re.MULTILINE)]
    assert len(asked) >= MIN_OBSERVED * len(CHAPTERS) and len(set(asked)) == len(asked)


@each_chapter
def test_stored_outputs_hold_no_error_and_no_local_path(chapter):
    for cell in code_cells(chapter):
        assert cell.execution_count, cell.source
        for output in cell.outputs:
            text = str(output.get("text", output.get("data", {}).get("text/plain", "")))
            assert output.output_type != "error" and "UsageError" not in text and "/tmp" not in text, cell.source
            assert output.get("name") != "stderr", cell.source


def coloured(png: str) -> float:
    """The fraction of the pixels that are coloured; axes, ticks and text are black, white or grey."""
    pixels = imread(io.BytesIO(base64.b64decode(png)))[..., :3]
    return float((pixels.max(-1) - pixels.min(-1) > MIN_COLOUR).mean())


@each_chapter
def test_stored_figures_are_not_empty(chapter):
    pictures = [
        output.data["image/png"]
        for cell in code_cells(chapter)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert pictures and min(map(coloured, pictures)) > MIN_COLOURED


def test_a_figure_without_data_counts_as_empty():
    figure = Figure(figsize=(7, 3))
    figure.subplots().set(xlabel="step", ylabel="loss", title="nothing")
    out = io.BytesIO()
    figure.savefig(out)
    assert coloured(base64.b64encode(out.getvalue()).decode()) <= MIN_COLOURED


@each_chapter
def test_at_most_a_fifth_of_the_cells_is_excluded_from_comparison(chapter):
    cells = code_cells(chapter)
    ignored = [cell for cell in cells if IGNORED & set(cell.metadata.get("tags", []))]
    assert len(ignored) <= MAX_IGNORED * len(cells)


def test_weave_corrects_a_stale_cell_and_nothing_else(tmp_path):
    source = CHAPTERS[0] / f"{CHAPTERS[0].name}.ipynb"
    notebook = nbformat.read(source, as_version=4)
    number, name, _ = next(weave.find_piece_cells(notebook))
    notebook.cells[number].source += "\n# another line"
    nbformat.write(notebook, tmp_path / "one.ipynb")
    assert [place for place, _, _ in weave.find_stale_piece_cells(notebook)] == [number]
    assert weave.update_piece_cells(tmp_path / "one.ipynb") == [name]
    assert nbformat.read(tmp_path / "one.ipynb", as_version=4) == nbformat.read(source, as_version=4)
    assert weave.update_piece_cells(tmp_path / "one.ipynb") == []


def test_weave_reports_what_it_cannot_do(tmp_path, capsys):
    assert weave.main([str(tmp_path)]) == 2
    assert "holds no notebook" in capsys.readouterr().err
    cells = [nbformat.v4.new_code_cell("%%piece minidist.data.partition:blocks\nx = 1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
    with pytest.raises(UserError, match="has no blocks"):
        weave.update_piece_cells(tmp_path / "one.ipynb")
