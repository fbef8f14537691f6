"""Overlap shown by the order of events, which no machine's speed can change: what is launched while backward runs."""

from minidist.comm import Meter, bind
from minidist.config import CommConfig, Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate
from minidist.mesh import Mesh
from minidist.models import Transformer, init_parameters
from minidist.parallelize import USES, parallelize
from minidist.train.step import Engine

SEQ_LEN = 8


def launches_and_block_ends(world, gradients):
    """Places in the order of events: of the launched gradient all-reduces, and of the end of each block's backward."""
    config = Config(comm=CommConfig(gradients=gradients))
    groups = bind(world, Mesh(dp=world.size), USES, meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, 0)
    for block in model.model.layers:
        block.register_full_backward_hook(lambda *_: groups.meter.event("block"))
    engine = Engine(parallelize(model, groups, config), groups, config.optim, 0)
    groups.meter.records.clear()  # the broadcast of the start
    batches = Loader(generate(4 * SEQ_LEN + 1), SEQ_LEN, 0).micro_batches(0, 4, world.rank, world.size, 1)
    engine.step(0, batches, 1e-3)
    sent = [r.launched for r in groups.meter.records if r.name == "all_reduce" and r.use == "grads"]
    return sent, [tick for tick, _ in groups.meter.events]


def test_the_first_bucket_is_launched_before_half_of_backward_is_done(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "bucketed"):
        assert len(ends) == Config().model.num_layers == 4
        assert sent[0] < ends[len(ends) // 2 - 1]  # before the second of four blocks is through


def test_only_what_backward_gives_last_is_launched_after_the_last_block(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "bucketed"):
        assert sum(tick > ends[-1] for tick in sent) == 1


def test_the_naive_version_launches_nothing_inside_backward(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "naive"):
        assert len(ends) == 4
        assert sent[0] > ends[-1]
