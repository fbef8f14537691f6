"""The course as a learner has it: JupyterLab in a browser, from `make lab`'s own command on.

The quick suite runs one chapter from top to bottom, and of every other one the cells up to its first exercise: set-up,
live ranks, a prediction and its measurement, the answer cell that JupyterLab adds. `make test-all` runs all of them
from top to bottom. What the remaining cells print, nbval compares in every run (test_notebook_rebuilds_package.py).
Screenshots go to the folder in MINIDIST_SCREENSHOTS, else to pytest's.
"""

import json
import os
from pathlib import Path

import pytest

from exercises import stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.work import Work
from minidist.tools.pieces import read_symbol_source

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright")
from tests.helpers.browser import CHROMIUM, Notebook, jupyter_lab  # noqa: E402

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="the browser test needs Chromium, which is not here"),
    pytest.mark.process_lifecycle,
]

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
RIGHT = stubs.generate_answer(BLOCK, "right_loop")
# An answer in which every rank first waits for the next one, which waits as well.
WAITS = """    def reduce_sums(self) -> None:
        from minidist.comm import recv

        if self.group.size > 1:
            recv(torch.zeros(1), (self.group.rank + 1) % self.group.size, self.group)
"""
HANGS = CATALOGUE["data_parallel"].solution.read_text().replace("    def reduce_sums(self) -> None:\n", WAITS)
PIECE = "minidist.simple.parallelize:make_reducer"
SOURCE = read_symbol_source(PIECE)
STEP = """
from minidist.comm import bind
from minidist.config import Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.simple.engine import Engine
from minidist.simple.parallelize import group_specs, parallelize

shape = ModelConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
mesh, config = Mesh(dp=world_size), Config(model=shape)
groups = bind(world, mesh, group_specs(mesh, config))
engine = Engine(parallelize(Transformer(shape), groups, config), groups, config)
groups.meter.operations.clear()
loader = Loader(generate_text(20_000), seq_len=32, seed=0, min_length=1)
engine.step(0, loader.micro_batches(0, 4, rank, world_size, 1), 0.1)
groups.meter.operations["grads", "all_reduce"], len(engine.reducer.parameters)
"""
SMALL = [
    "%load_ext minidist.tools.notebook\n%load_ext exercises",
    "%ranks 2",
    "%%ranks\nfrom minidist.data.partition import block_partition\nblock_partition(10, world_size, rank).tolist()",
    f"%%piece {PIECE}\n{SOURCE}",
    f"%%ranks{STEP}",
    "%exercise block_partition",
]
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*/*.ipynb"))


def notebook_file(cells) -> str:
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [{**code, "id": f"cell-{n}", "source": source} for n, source in enumerate(cells)]
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = Work(tmp_path_factory.mktemp("learner") / "work")
    work.update(CATALOGUE)
    (work.folder / "small.ipynb").write_text(notebook_file(SMALL))
    return work


@pytest.fixture(scope="module")
def lab(work, tmp_path_factory):
    with jupyter_lab(work.folder, tmp_path_factory.mktemp("jupyter")) as url:
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser window, whose pages share a cache: JupyterLab's code is compiled once."""
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("chromium"))}
    how = {"executable_path": CHROMIUM, "args": ["--no-sandbox"], "env": environ}
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), viewport={"width": 1200, "height": 1000}, **how
        )
        yield context
        context.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def pictures(tmp_path) -> Path:
    return Path(os.environ.get("MINIDIST_SCREENSHOTS", tmp_path))


@pytest.fixture
def small(page, lab, pictures):
    notebook = Notebook(page, lab, "small.ipynb", pictures)
    notebook.run_all()
    assert notebook.errors() == []
    return notebook


def test_a_learners_first_hour(small, work):
    """Fail and pass an exercise, edit a piece, hang and stop ranks, and continue."""
    assert "rank 0: [0, 1, 2, 3, 4]" in small.output(2)
    small.picture("1-run-all")

    answer = small.find("%%exercise block_partition")
    assert "not written yet" in small.run(answer)
    small.picture("2-not-written", answer)
    small.write(answer, "%%exercise block_partition\n" + RIGHT)
    assert "block_partition: passed, 10 of 10 points" in small.run(answer)
    assert work.entry(BLOCK)["passed"] and work.file(BLOCK).read_text().strip() == RIGHT.strip()
    small.picture("3-passed", answer)

    told = small.tell(f"%%exercise data_parallel\n{HANGS}")
    assert "deadlock: ranks 0-" in told and "waiting in recv" in told
    assert not work.entry(CATALOGUE["data_parallel"])["passed"]
    small.picture("4-exercise-hangs", len(small) - 1)

    assert "ranks 0-1: (3, 20)" in small.output(4)  # the token count, one bucket, and who used what
    naive = SOURCE.replace('if config.comm.gradients == "naive":', "if True:")
    assert naive != SOURCE
    small.write(3, f"%%piece {PIECE}\n{naive}")
    assert f"{PIECE} replaced here and on 2 ranks" in small.run(3)
    assert "ranks 0-1: (22, 20)" in small.run(4)  # a message for each parameter
    assert "the package's own again" in small.tell("%piece --reset")
    assert "ranks 0-1: (3, 20)" in small.run(4)

    hang_stop_and_go_on(small)
    assert small.errors() == []


def hang_stop_and_go_on(notebook):
    """A cell that hangs is explained, one that never ends is stopped by the button, and variables are still there."""
    told = notebook.tell("%%ranks\nx = 10 + rank\nif rank == 0:\n    dist.all_reduce(torch.ones(1))")
    assert "deadlock" in told and "at line 4 of the cell" in told and "rank 1 reached the end of the cell" in told
    notebook.picture("5-deadlock", len(notebook) - 1)
    endless = notebook.add("%%ranks --quiet 600\nprint('I begin')\nwhile True:\n    pass")
    notebook.begin(endless)
    notebook.shows(endless, "ranks 0-1: I begin")
    notebook.picture("6-endless", endless)
    notebook.stop()
    told = notebook.ended(endless)
    assert told.count("I begin") == 1 and "stopped; the ranks stood here" in told
    notebook.picture("7-stopped", endless)
    assert "rank 0: 10\nrank 1: 11" in notebook.tell("%%ranks\nx")


IN_FULL = "02c_context"  # the shortest one


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", [path for path in CHAPTERS if path.stem != IN_FULL], ids=lambda path: path.stem)
def test_a_chapter_runs_up_to_its_first_exercise(page, lab, work, pictures, chapter):
    """In a copy that ends there: to show the other hundred cells costs more than to run these."""
    folder = work.folder / "chapters" / chapter.parent.name
    contents = json.loads((folder / chapter.name).read_text())
    sources = ["".join(cell["source"]) for cell in contents["cells"]]
    first = next(i for i, source in enumerate(sources) if source.startswith("%exercise "))
    code = [i for i in range(first + 1) if contents["cells"][i]["cell_type"] == "code"]
    copy = folder / f"{chapter.stem}_beginning.ipynb"
    copy.write_text(json.dumps({**contents, "cells": contents["cells"][: first + 1]}))
    notebook = Notebook(page, lab, copy.relative_to(work.folder).as_posix(), pictures / chapter.stem)
    before = len(notebook)
    for index in code:
        notebook.run(index)
    assert notebook.errors() == []
    name = sources[first].split()[1]
    assert len(notebook) == before + 1 and notebook.find(f"%%exercise {name}") == first + 1
    notebook.picture("exercise", first)


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(path, marks=() if path.stem == IN_FULL else pytest.mark.exhaustive) for path in CHAPTERS],
    ids=lambda path: path.stem,
)
def test_a_chapter_runs_from_top_to_bottom_and_goes_on(page, lab, pictures, chapter):
    notebook = Notebook(page, lab, f"chapters/{chapter.parent.name}/{chapter.name}", pictures / chapter.stem)
    notebook.run_all(timeout_ms=240_000)
    assert notebook.errors() == []
    notebook.picture("1-run-all")
    notebook.tell("%ranks 2")
    hang_stop_and_go_on(notebook)
