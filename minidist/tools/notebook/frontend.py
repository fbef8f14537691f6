"""Whether somebody looks on while a notebook runs, and what is shown to them meanwhile."""

from IPython.display import clear_output, display


def somebody_looks_on(shell) -> bool:
    """Whether a person runs this cell. A notebook that a program runs and stores (nbconvert, nbval) must not depend on
    how long its cells take."""
    kernel = getattr(shell, "kernel", None)
    request = (kernel.get_parent() or {}).get("content", {}) if kernel is not None else {}
    return bool(request.get("allow_stdin"))  # people can be asked something, programs cannot


class WhileRunning:
    """Text below a cell that runs. At its end it goes, and the cell's own output comes."""

    def __init__(self):
        self._handle = None

    def __call__(self, text: str) -> None:
        """Show this text in place of the one before."""
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def end(self, more_comes: bool) -> None:
        """Take the text away. more_comes: when the next output comes, so that nothing flickers."""
        if self._handle is not None:
            clear_output(wait=more_comes)
