"""The benchmark of deadlock detection: a real store, simulated ranks, and the report at the end."""

import json

from bench.__main__ import main


def test_the_costs_of_each_number_of_ranks_are_measured(server, tmp_path, capsys):
    file = tmp_path / "watch.json"
    assert main(["watch", "--ranks", "2", "--ranks", "24", "--seconds", "3", "--json", str(file)], server) == 0
    costs = json.loads(file.read_text())["costs"]
    assert [cost["ranks"] for cost in costs] == [2, 24]
    for cost in costs:
        assert 0 < cost["client"] <= cost["leader"] and cost["server"] > 0 and 0 < cost["report_s"] < 3
    assert "24 ranks: a rank's thread" in capsys.readouterr().out


def test_impossible_options_are_refused(server, capsys):
    assert main(["watch", "--ranks", "1"], server) == 2
    assert "--ranks is 1; it must be at least 2" in capsys.readouterr().err
