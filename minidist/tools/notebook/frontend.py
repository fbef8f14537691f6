"""The notebook's front end: whether a person runs the cell, and output that changes while it runs."""

from IPython.display import clear_output, display


def is_interactive(shell) -> bool:
    """Return whether a person runs this cell, not a program such as nbval, whose stored output must not vary."""
    kernel = getattr(shell, "kernel", None)
    request = (kernel.get_parent() or {}).get("content", {}) if kernel is not None else {}
    return bool(request.get("allow_stdin"))  # people can be asked something, programs cannot


class LiveOutput:
    """Text below a running cell, which the output of the cell replaces when the cell ends. Call it to show a text."""

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
        """Remove the text. wait: remove it only when the cell shows its next output, which avoids flicker."""
        if self._handle is not None:
            clear_output(wait=wait)
