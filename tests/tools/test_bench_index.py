"""The benchmark of the checkpoint index: its numbers are those of the index that it wrote."""

import json
import signal

import pytest

from bench import __main__ as bench
from bench import plan_index
from bench.__main__ import main


def test_the_index_is_planned_for_many_ranks(tmp_path, capsys):
    file = tmp_path / "index.json"
    assert main(["index", "--ranks", "300", "--layers", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["ranks"] == 300 and result["flat_parameters"] == 3
    assert 0 < result["index_bytes_per_rank_and_flat_parameter"] < 100
    assert 0 < result["plan_bytes_per_rank_and_flat_parameter"] < 1000
    assert result["bytes_of_a_rank_with_cached_plan"] < 250
    assert "index, bytes per rank and flat parameter" in capsys.readouterr().out


def test_impossible_options_are_refused(capsys):
    assert main(["index", "--ranks", "0"]) == 2
    assert "--ranks is 0; it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("inherited", [signal.SIG_IGN, signal.default_int_handler], ids=["background", "foreground"])
def test_sigint_ends_a_benchmark_even_if_its_shell_ignores_it(monkeypatch, inherited):
    """A shell script lets a command that it starts with & ignore SIGINT."""

    def benchmark(arguments, server):
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(plan_index, "main", benchmark)
    before = signal.signal(signal.SIGINT, inherited)
    try:
        assert bench.run(["index"]) == 130
        assert signal.getsignal(signal.SIGINT) == inherited
    finally:
        signal.signal(signal.SIGINT, before)
