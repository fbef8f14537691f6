"""The magic commands of a notebook: `%load_ext minidist.tools.notebook` makes them known.

%ranks 4                   start four ranks, which live until %ranks --stop (--memory 2: at most 2 GiB for each)
%%ranks                    run the cell on every rank (--quiet 60: stop it after 60 s without progress)
%%piece module:symbol      replace that function or class by the cell's text, here and on every rank
%piece --reset [name]      restore the original of this symbol, or of all replaced symbols
"""

import atexit
import shlex
from collections.abc import Collection

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer
from minidist.tools.notebook.frontend import LiveOutput, is_interactive
from minidist.tools.notebook.session import QUIET_S, LiveRanks
from minidist.tools.pieces import SymbolReplacements

_HELP = "write %ranks 4 for four ranks, %%ranks on top of a cell to run it on each of them, %ranks --stop to end them"
_NAMED = 4  # names in one message
_OPTIONS = {"--device": str, "--quiet": float, "--timeout": float, "--memory": float}


@magics_class
class RanksMagics(Magics):
    """The magics `%ranks` and `%%piece` of one notebook; owns the notebook's ranks and its replaced symbols.

    server: a rank server, which starts the ranks; None: create one, and close it in `close`. pieces: the symbols
    replaced in this process. sources: their new sources. live: the ranks, None before `%ranks`.
    """

    def __init__(self, shell, server: RankServer | None = None):
        super().__init__(shell)
        self.pieces, self.sources = SymbolReplacements(), {}
        self.live: LiveRanks | None = None
        self.server, self._own = server or RankServer(), server is None
        atexit.register(self.close)

    def close(self) -> None:
        """Kill the ranks, close the rank server if this object created it, and restore replaced symbols."""
        atexit.unregister(self.close)
        self.pieces.restore_symbols()
        self.sources.clear()
        self._stop_ranks()
        if self._own:
            self.server.close()

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None):
        """Start ranks (`%ranks 4`), stop them (`%ranks --stop`), or run a cell on every rank (`%%ranks`)."""
        words, options = _parse_magic_line(line, "--stop")
        if cell is not None:
            if words or options.keys() - {"--quiet", "--timeout"}:
                raise UsageError(f"%%ranks takes --quiet and --timeout, in seconds, not {line.strip()!r}; {_HELP}")
            return self._run_cell(cell, options)
        if "--timeout" in options:
            raise UsageError(f"--timeout is for one cell, after %%ranks; {_HELP}")
        if "--stop" in words:
            self._stop_ranks()
            print("no ranks")
        elif words:
            self._start_ranks(words, options)
        else:
            print(_format_rank_count(self.live) if self.live else f"no ranks; {_HELP}")

    @line_cell_magic
    def piece(self, line: str, cell: str | None = None):
        """Replace a function or class of the package by the cell's source (`%%piece module:symbol`).

        `%piece --reset` restores all replaced symbols, `%piece --reset module:symbol` restores one.
        """
        words = shlex.split(line)
        if cell is None:
            if words[:1] != ["--reset"] or len(words) > 2:
                raise UsageError("write %piece --reset, or %piece --reset module:symbol; to replace one, %%piece")
            names = self._restore_symbols(*words[1:])
            what = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} pieces"
            print(f"the package's own again: {what}" if names else "nothing is replaced")
            return
        if len(words) != 1:
            raise UsageError("write %%piece module:symbol, as in %%piece minidist.data.partition:block_partition")
        self.replace_symbol(words[0], "\n" + cell)  # line numbers as the notebook shows them

    def _start_ranks(self, words: list[str], options: dict) -> None:
        """Stop the present ranks and start the number of ranks in `words`; bind them to the variable `ranks`."""
        if len(words) != 1 or not words[0].isdigit() or not int(words[0]):
            raise UsageError(f"{' '.join(words)!r} is no number of ranks; {_HELP}")
        self._stop_ranks()
        device, quiet_s = options.get("--device", "cpu"), options.get("--quiet", QUIET_S)
        try:
            self.live = LiveRanks(
                int(words[0]), device=device, quiet_s=quiet_s, memory_gib=options.get("--memory"),
                server=self.server, pieces=self.pieces, sources=self.sources,
            )  # fmt: skip
        except (UserError, RunError) as error:
            raise UsageError(str(error)) from None
        self.shell.user_ns["ranks"] = self.live
        print(f"{_format_rank_count(self.live)} on {self.live.device}")

    def _run_cell(self, cell: str, options: dict) -> None:
        """Run a cell on every rank and show its result."""
        if self.live is None:
            raise UsageError(f"there are no ranks yet; {_HELP}")
        shown = LiveOutput()
        try:
            result = self.live.run(
                cell,
                name=self._cell_number(),
                first_line=2,  # below the magic itself
                quiet_s=options.get("--quiet"),
                timeout_s=options.get("--timeout"),
                show=shown if is_interactive(self.shell) else None,
            )
        except (UserError, RunError) as error:
            raise UsageError(str(error)) from None
        shown.clear(wait=bool(str(result)))
        if str(result):
            print(result)

    def _cell_number(self) -> int:
        """Return the number that the notebook shows beside this cell.

        IPython increments it before or after a cell.
        """
        return max(1, len(self.shell.user_ns.get("In", ())) - 1)

    def replace_symbol(self, name: str, source: str, also_replaced: Collection[str] = ()) -> None:
        """Replace a function or class of the package, in this process and on the ranks, and print a line that says so.

        name: such as "module:function". source: the text of the new definition. also_replaced: names of other symbols
        that `source` may define, too. Raises UsageError if the symbol cannot be replaced.
        """
        try:
            if self.live is not None:
                self.live.replace_symbol(name, source, also_replaced)
            else:
                self.pieces.replace_symbol(name, source, f"piece {name}", also_replaced=also_replaced)
                self.sources[name] = source, tuple(also_replaced)
        except UserError as error:
            raise UsageError(str(error)) from None
        except SyntaxError as error:
            raise UsageError(f"line {error.lineno} of the cell: {error.msg}; {name} is as before") from None
        except Exception as error:
            raise UsageError(f"running the cell raised {type(error).__name__}: {error}; {name} is as before") from None
        where = f"here and on {_format_rank_count(self.live)}" if self.live else "here"
        print(f"{name} replaced {where}")

    def _restore_symbols(self, name: str | None = None) -> list[str]:
        """Restore one replaced symbol, or all, here and on the ranks; return their names."""
        if self.live is not None:
            return self.live.restore_symbols(name)
        names = self.pieces.restore_symbols(name)
        for each in names:
            del self.sources[each]
        return names

    def _stop_ranks(self) -> None:
        """Kill the ranks, if there are any, and delete the variable `ranks`."""
        if self.live is not None:
            self.live.close()
            self.live = None
            self.shell.user_ns.pop("ranks", None)


def _format_rank_count(live: LiveRanks) -> str:
    """Return the number of ranks as text, such as "4 ranks"."""
    return f"{live.n} rank" + ("s" if live.n > 1 else "")


def _parse_magic_line(line: str, *flags: str) -> tuple[list[str], dict]:
    """Split a magic's line into words and options."""
    words, options = [], {}
    rest = iter(shlex.split(line))
    for word in rest:
        name, _, value = word.partition("=")
        if name in _OPTIONS:
            value = value or next(rest, "")
            try:
                options[name] = _OPTIONS[name](value)
            except ValueError:
                unit = "GiB" if name == "--memory" else "seconds"
                raise UsageError(f"{name} {value!r}: give {unit} as a number; {_HELP}") from None
        elif word.startswith("-") and word not in flags:
            raise UsageError(f"no option {word}; there are {', '.join([*_OPTIONS, *flags])}")
        else:
            words.append(word)
    return words, options
