"""Drive JupyterLab in a real browser: `python -m exercises lab` on a learner's folder, and one notebook of it."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from exercises.catalogue import ROOT
from minidist.tools.launch.parent_death import die_with_parent
from tests.helpers.processes import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S = 240.0
WAIT_MS = 200_000
_POLL_MS = 200  # by default playwright asks in every frame, which costs more CPU time than most cells
_CELLS = ".jp-Notebook .jp-Cell"

# In the page. A cell's number changes when it has run; -1 stands for all code cells that there are now. A cell that
# asks for a prediction gets one.
_CHOSEN = """([selector, index]) => {
    const cells = [...document.querySelectorAll(selector)];
    const chosen = index >= 0 ? [cells[index]] : cells.filter(cell => cell.classList.contains("jp-CodeCell"));
    const number = cell => cell.querySelector(".jp-InputPrompt, .jp-Placeholder-prompt")?.innerText ?? "";
    const empty = cell => cell.querySelector(".cm-line")?.innerText === "";
    %s
}"""
_MARK = _CHOSEN % "chosen.forEach(cell => { cell.dataset.before = number(cell); });"
_RAN = (
    _CHOSEN
    % """
    const field = document.querySelector(".jp-Stdin-input");
    if (field) {
        field.value = "0";
        field.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
    }
    const marked = chosen.filter(cell => cell.dataset.before !== undefined && !empty(cell));
    const ran = cell => /[0-9]/.test(number(cell)) && number(cell) !== cell.dataset.before;
    // An error ends Run All: then no cell waits any more, and some have not run.
    return marked.every(ran) || (index < 0 && ran(marked[0]) && marked.every(cell => !number(cell).includes("*")));
"""
)
_FIRST_LINES = """selector => [...document.querySelectorAll(selector)].map(
    cell => cell.querySelector(".cm-line")?.innerText ?? "")"""


@contextlib.contextmanager
def jupyter_lab(work: Path, private: Path) -> Iterator[str]:
    """JupyterLab on the learner's folder `work`, with settings of its own in `private`; its address with the token."""
    environ = {**os.environ, "IPYTHONDIR": str(private / "ipython"), "JUPYTER_PREFER_ENV_PATH": "1"}
    for name in ("CONFIG", "DATA", "RUNTIME"):
        environ[f"JUPYTER_{name}_DIR"] = str(private / name.lower())
    settings = private / "config" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    # All cells are in the page, also those that nobody would see without scrolling.
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    options = [
        "--no-browser",
        "--port=0",
        "--IdentityProvider.token=learner",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
    ]
    command = [sys.executable, "-m", "exercises", "--work", str(work), "lab", *options]
    # A killed pytest leaves no JupyterLab behind.
    how = {"start_new_session": True, "preexec_fn": functools.partial(die_with_parent, os.getpid())}
    with (
        open(private / "lab.log", "w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, **how) as process,
    ):
        try:
            address = private / "runtime" / f"jpserver-{process.pid}.json"
            up = wait_until(lambda: process.poll() is not None or _read_json(address), START_S)
            assert up and process.poll() is None, (private / "lab.log").read_text()
            yield f"http://127.0.0.1:{_read_json(address)['port']}"
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read_json(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


class Notebook:
    """A notebook in the browser. Cells are counted from 0; every wait has a timeout, by default `WAIT_MS`."""

    def __init__(self, page, url: str, path: str, pictures: Path):
        self.page, self._pictures = page, pictures
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{url}/lab/tree/{path}?token=learner&reset")
        page.locator(_CELLS).first.wait_for()
        self.idle()

    def idle(self, timeout_ms: float = WAIT_MS) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.get_by_text("Python 3 (ipykernel) | Idle", exact=True).wait_for(timeout=timeout_ms)

    def __len__(self) -> int:
        return self.page.locator(_CELLS).count()

    def output(self, index: int) -> str:
        """The text below a cell."""
        return "\n".join(self._cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def find(self, begins: str) -> int:
        """The first cell that begins with this line."""
        lines = self.page.evaluate(_FIRST_LINES, _CELLS)
        assert begins in lines, f"no cell begins with {begins!r}; they begin with {lines}"
        return lines.index(begins)

    def errors(self) -> list[str]:
        """The notebook's errors: tracebacks, and output to stderr."""
        kinds = [f"[data-mime-type='application/vnd.jupyter.{kind}']" for kind in ("error", "stderr")]
        return self.page.locator(", ".join(kinds)).all_inner_texts()

    def run_all(self, timeout_ms: float = WAIT_MS) -> None:
        """Choose Run All Cells in the menu; wait until every cell has run or one has raised."""
        self.page.evaluate(_MARK, [_CELLS, -1])
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(_RAN, arg=[_CELLS, -1], timeout=timeout_ms, polling=_POLL_MS)
        self.idle()

    def write(self, index: int, text: str) -> None:
        """Replace the cell's source by this text."""
        self._cell(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)

    def add(self, text: str) -> int:
        """Add a cell at the end; return its number."""
        self._cell(len(self) - 1).locator(".jp-InputPrompt, .jp-InputArea-prompt").first.click()
        self.page.keyboard.press("Escape")
        before = len(self)
        self.page.keyboard.press("b")
        self.page.wait_for_function(
            "([selector, n]) => document.querySelectorAll(selector).length > n", arg=[_CELLS, before]
        )
        self.write(before, text)
        return before

    def begin(self, index: int) -> None:
        """Start a cell without waiting for its end. A folded one is unfolded first."""
        for folded in self._cell(index).locator(".jp-InputPlaceholder").all():
            folded.click()
        self._cell(index).locator(".cm-content").click()
        self.page.evaluate(_MARK, [_CELLS, index])
        self.page.keyboard.press("Control+Enter")

    def ended(self, index: int, timeout_ms: float = WAIT_MS) -> str:
        """Wait until a started cell has ended; return its output."""
        self.page.wait_for_function(_RAN, arg=[_CELLS, index], timeout=timeout_ms, polling=_POLL_MS)
        self.idle()
        return self.output(index)

    def run(self, index: int, timeout_ms: float = WAIT_MS) -> str:
        self.begin(index)
        return self.ended(index, timeout_ms)

    def tell(self, text: str, timeout_ms: float = WAIT_MS) -> str:
        """Add a cell and run it; return its output."""
        return self.run(self.add(text), timeout_ms)

    def shows(self, index: int, text: str) -> None:
        """Wait until the cell's output contains this text; the cell may still run."""
        self._cell(index).locator(".jp-OutputArea", has_text=text).first.wait_for()

    def stop(self) -> None:
        """Press the toolbar's stop button."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]').first.click()

    def picture(self, name: str, index: int | None = None) -> None:
        """Take a screenshot, scrolled to the end of a cell's output if a cell is given."""
        self._pictures.mkdir(parents=True, exist_ok=True)
        if index is not None:
            self._cell(index).evaluate("cell => cell.scrollIntoView({block: 'end'})")
        self.page.screenshot(path=self._pictures / f"{name}.png")

    def _cell(self, index: int):
        return self.page.locator(_CELLS).nth(index)
