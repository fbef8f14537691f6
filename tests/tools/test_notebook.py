"""The magic commands, in an IPython shell of this process."""

import atexit
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("IPython")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from minidist.data.partition import block_partition as imported_before
from minidist.tools.notebook.magics import RanksMagics

PIECE = "minidist.data.partition:block_partition"
BACKWARDS = "def block_partition(n, world_size, rank):\n    return ['mine', n, world_size, rank]\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shell = InteractiveShell(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    shell.builtin_trap.deactivate()


@pytest.fixture
def cell(shell, server, capsys):
    """Runs a cell as a notebook would and returns what it printed."""
    magics = RanksMagics(shell, server)
    shell.register_magics(magics)

    def run(text: str) -> str:
        capsys.readouterr()
        ran = shell.run_cell(text, store_history=True)
        if not isinstance(ran.error_in_exec, UsageError):  # which the shell has printed, short
            ran.raise_error()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return out + err

    yield run
    magics.close()


def test_ranks_answer_and_keep_their_variables(cell):
    assert cell("%ranks 3") == "3 ranks on cpu\n"
    assert cell("%%ranks\nx = 2 * rank") == ""
    assert cell("%%ranks\nx") == "rank 0: 0\nrank 1: 2\nrank 2: 4\n"
    assert cell("%%ranks\nprint('hello')") == "ranks 0-2: hello\n"
    assert cell("ranks.get('x')").endswith("[0, 2, 4]\n")
    assert cell("%ranks") == "3 ranks\n"


def test_lines_and_cells_are_numbered_as_the_notebook_shows_them(cell):
    cell("%ranks 2")
    output = cell("%%ranks\nx = 1\nif rank == 0:\n    dist.barrier()")
    assert "at line 4 of the cell" in output
    assert "line 3 of the cell: 1 / 0" in cell("%%ranks\nx\n1 / 0")


def test_a_deadlock_is_explained_and_the_next_cell_runs(cell):
    cell("%ranks 2")
    cell("%%ranks\nx = rank")
    assert "deadlock: rank 0 waits for something" in cell("%%ranks\nif rank == 0: dist.all_reduce(torch.ones(1))")
    assert cell("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nx, t.item()") == "rank 0: (0, 2.0)\nrank 1: (1, 2.0)\n"


def test_an_endless_loop_ends_after_the_time_given(cell):
    cell("%ranks 2")
    assert "nothing has moved for 0.3 s" in cell("%%ranks --quiet 0.3\nwhile True:\n    pass")
    assert "not done after 0.2 s" in cell("%%ranks --timeout=0.2\nwhile True:\n    pass")
    assert cell("%%ranks\n1") == "ranks 0-1: 1\n"


def test_ranks_asked_for_again_are_new_ones(cell):
    cell("%ranks 2")
    cell("%%ranks\nx = 1")
    assert cell("%ranks 3") == "3 ranks on cpu\n"
    assert "ranks 0-2 raised NameError" in cell("%%ranks\nx")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%ranks\n1", "there are no ranks yet"),
        ("%ranks none", "'none' is no number of ranks"),
        ("%ranks 0", "'0' is no number of ranks"),
        ("%ranks 2 3", "'2 3' is no number of ranks"),
        ("%ranks 2 --color red", "no option --color"),
        ("%ranks 2 --quiet soon", "--quiet 'soon': give seconds as a number"),
        ("%%ranks 3\n1", "%%ranks takes --quiet and --timeout"),
        ("%piece minidist.data.partition:block_partition", "write %piece --reset"),
        ("%%piece\n1", "write %%piece module:symbol"),
        ("%%piece minidist.data.partition:nothing\ndef nothing(): pass", "has no nothing"),
        ("%%piece minidist.data.partition:block_partition\ndef other(): pass", "defines no block"),
        (
            "%%piece minidist.data.partition:block_partition\ndef block_partition(:\n    pass",
            "line 2 of the cell: invalid syntax",
        ),
        ("%%piece minidist.data.partition:block_partition\n1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_wrong_use_is_answered_in_one_message(cell, line, message):
    output = cell(line)
    assert message in output and len(output.splitlines()) < 5


def test_a_piece_reaches_the_kernel_the_ranks_and_ranks_started_later(cell):
    original = imported_before(5, 2, 0).tolist()
    ask = "%%ranks\nfrom minidist.data.partition import block_partition\nblock_partition(5, 2, 0) if rank else 0"
    cell("%ranks 2")
    cell("%%ranks\nfrom minidist.data.partition import block_partition as early")
    assert cell(f"%%piece {PIECE}\n{BACKWARDS}") == f"{PIECE} replaced here and on 2 ranks\n"
    assert imported_before(5, 2, 0) == ["mine", 5, 2, 0]
    assert cell(ask) == "rank 0: 0\nrank 1: ['mine', 5, 2, 0]\n"
    assert cell("%%ranks\nearly(1, 1, 1)") == "ranks 0-1: ['mine', 1, 1, 1]\n"
    cell("%ranks 2")
    assert cell(ask) == "rank 0: 0\nrank 1: ['mine', 5, 2, 0]\n"
    assert "are gone" in cell("%%ranks\nimport os\nos._exit(1)")
    assert cell(ask) == "rank 0: 0\nrank 1: ['mine', 5, 2, 0]\n"
    assert cell("%piece --reset") == f"the package's own again: {PIECE}\n"
    assert imported_before(5, 2, 0).tolist() == original
    assert cell(ask) == f"rank 0: 0\nrank 1: array({original})\n"
    assert cell("%piece --reset") == "nothing is replaced\n"


def test_a_piece_replaced_before_there_are_ranks_reaches_them(cell):
    assert cell(f"%%piece {PIECE}\n{BACKWARDS}") == f"{PIECE} replaced here\n"
    cell("%ranks 2")
    assert "'mine'" in cell("%%ranks\nfrom minidist.data.partition import block_partition\nblock_partition(1, 1, 0)")
    cell(f"%piece --reset {PIECE}")
    assert "'mine'" not in cell("%%ranks\nblock_partition(1, 1, 0)")


def test_an_error_in_a_piece_names_the_line_that_called_it(cell):
    cell("%ranks 2")
    cell(f"%%piece {PIECE}\n\ndef block_partition(n, world_size, rank):\n    return 1 / 0\n")
    output = cell("%%ranks\nfrom minidist.data.partition import block_partition\nblock_partition(1, 1, 0)")
    assert "line 3 of the cell: block_partition(1, 1, 0)" in output
    assert f"raised at piece {PIECE}:4 in block_partition" in output


def test_the_extension_loads_and_leaves_nothing(shell, capsys):
    assert not shell.run_line_magic("load_ext", "minidist.tools.notebook")
    shell.run_line_magic("ranks", "1")
    shell.run_cell_magic("ranks", "", "rank")
    shell.run_cell_magic("piece", PIECE, BACKWARDS)
    live = shell.user_ns["ranks"]
    shell.run_line_magic("unload_ext", "minidist.tools.notebook")
    assert capsys.readouterr().out.startswith("1 rank on cpu\nrank 0: 0\n")
    assert live._job.has_ended and live._server._process.poll() is not None
    assert len(imported_before(4, 2, 0)) == 2


@pytest.fixture
def published(shell, monkeypatch):
    """What the notebook shows besides text, in order: (what, text). `published.then(text)` is called after each."""

    class Shown(list):
        def then(self, text):
            pass

    shown = Shown()

    def publish(data, metadata=None, source=None, *, transient=None, update=False, **_):
        shown.append(("update" if update else "display", data["text/plain"]))
        shown.then(data["text/plain"])

    monkeypatch.setattr(InteractiveShell, "_instance", shell, raising=False)
    monkeypatch.setattr(shell.display_pub, "publish", publish)
    monkeypatch.setattr(shell.display_pub, "clear_output", lambda wait=False: shown.append(("clear", wait)))
    return shown


def look_on(shell, person: bool) -> None:
    shell.kernel = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": person}})


@pytest.mark.parametrize("last", ["print('c')", ""], ids=["with text", "without"])
def test_what_ranks_print_is_seen_until_the_result_takes_its_place(cell, shell, published, tmp_path, last):
    look_on(shell, True)
    wait = f"while not os.path.exists({str(tmp_path)!r} + '/{{}}'):\n    pass\n"
    published.then = lambda text: (tmp_path / text[-1]).touch()
    cell("%ranks 2")
    source = "import os\nprint('a')\n" + wait.format("a") + "print('b')\n" + wait.format("b") + last
    output = cell(f"%%ranks\n{source}")
    assert output == "ranks 0-1:\n  a\n  b\n" + "  c\n" * bool(last)
    assert [entry[0] for entry in published] == ["display", "update", "clear"]
    assert published[0][1] == "ranks 0-1: a" and published[-1] == ("clear", True)


def test_a_program_that_runs_a_notebook_sees_the_result_only(cell, shell, published):
    look_on(shell, False)
    cell("%ranks 2")
    longer = "import time\nprint('a')\nend = time.monotonic() + 0.8\nwhile time.monotonic() < end:\n    pass\n"
    assert cell(f"%%ranks\n{longer}print('b')") == "ranks 0-1:\n  a\n  b\n"
    assert published == []
