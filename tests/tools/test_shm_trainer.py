"""Training on `shm` gives the results of training on gloo."""

import json
import sys

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.config import CommConfig, Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.tools.launch import start
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import small_config, train_small, write_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("size", [3, *exhaustive(2)])
def test_losses_are_equal_over_shm_and_gloo(ranks, tmp_path, size):
    text = write_text(tmp_path)
    for backend in ("shm", "gloo"):
        ranks(train_small, size, small_config(tmp_path / backend, text), backend=backend)
    shm, gloo = losses(tmp_path / "shm"), losses(tmp_path / "gloo")
    assert len(shm) == 6
    if size == 2:
        assert shm == gloo
    assert shm == pytest.approx(gloo, rel=1e-5)  # three ranks add in another order: see test_trainer


def through_the_door(world: World) -> list:
    meter = Meter()
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=meter)["data"]
    total, whole = torch.full((7,), float(world.rank)), torch.empty(3 * world.size)
    comm.all_reduce(total, group)
    comm.all_gather(whole, torch.full((3,), float(world.rank)), group, async_op=True).wait()
    try:
        comm.broadcast(torch.ones(3 + world.rank), 0, group)
    except comm.CommError as error:
        return [total[0].item(), whole.tolist(), [record.name for record in meter.records], str(error)]
    return []


def test_collectives_over_shm_are_metered_and_explained(ranks):
    for total, whole, names, message in ranks(through_the_door, 2, backend="shm"):
        assert (total, whole, names) == (1.0, [0.0] * 3 + [1.0] * 3, ["all_reduce", "all_gather", "broadcast"])
        assert (
            "'data' (ranks 0, 1) failed: ranks" in message
            and "do not do the same: rank 0: operation 3: broadcast" in message
        )
        assert "[3]" in message and "[4]" in message


def test_shm_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(start, "count_gpus", lambda: 2)
    config = Config(comm=CommConfig(backend="shm"))
    with pytest.raises(UserError, match="shm is for ranks on CPU"):
        start.resolve_device(config, 2)
    assert start.resolve_device(Config(comm=CommConfig(backend="shm"), device="cpu"), 2) == "cpu"
