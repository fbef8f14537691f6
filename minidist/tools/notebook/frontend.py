"""The notebook's front end: whether a person runs the cell, and output that changes while it runs."""

from IPython.display import clear_output, display


def is_interactive(shell) -> bool:
    """Return whether a person runs the current cell, not a program such as nbval, which compares stored outputs."""
    kernel = getattr(shell, "kernel", None)
    request = (kernel.get_parent() or {}).get("content", {}) if kernel is not None else {}
    return bool(request.get("allow_stdin"))  # people can be asked something, programs cannot


class LiveOutput:
    """Text shown below a notebook cell while it runs, and removed when the cell ends. Call the object with a text to
    show it."""

    def __init__(self):
        self._handle = None

    def __call__(self, text: str) -> None:
        """Show this text in place of the previous one."""
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def clear(self, wait: bool) -> None:
        """Remove the text. wait: keep it until the cell shows its next output, which avoids flicker."""
        if self._handle is not None:
            clear_output(wait=wait)
