"""The benchmark of checkpoints: it measures every contender, and refuses impossible options."""

import json

from bench.__main__ import main
from bench.time_saves import CONTENDERS


def test_every_contender_is_measured_on_every_number_of_ranks(server, tmp_path, capsys):
    file = tmp_path / "save.json"
    options = ["--ranks", "1", "--ranks", "2", "--rounds", "1", "--mib", "32", "--folder", str(tmp_path)]
    assert main(["save", *options, "--json", str(file)], server) == 0
    results = json.loads(file.read_text())
    for ranks in ("1", "2"):
        median = results["ranks"][ranks]["median"]
        assert set(median) == set(CONTENDERS)
        for stall, save, memory in median.values():
            assert 0 < stall <= save and memory > 0
        # The background save keeps a copy of the state: 32 MiB over all ranks.
        assert median["minidist background"][2] >= 32 * 2**20
    assert "stall of minidist background / plain copy" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["save.json"]


def test_impossible_options_are_refused(server, capsys):
    assert main(["save", "--rounds", "0"], server) == 2
    assert "--rounds is 0; it must be at least 1" in capsys.readouterr().err
