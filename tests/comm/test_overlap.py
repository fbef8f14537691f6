"""Overlap of communication and computation, shown by the order of events, which does not depend on speed."""

from minidist.comm import Meter, bind
from minidist.config import CommConfig, Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import DEFAULT_GROUP_SPECS, parallelize
from minidist.train.engine import Engine

SEQ_LEN = 8


def meter_of_one_step(world, gradients, micro_batches=1):
    """The meter of one step, with events at the start of each block's forward and the end of its backward."""
    config = Config(comm=CommConfig(gradients=gradients))
    groups = bind(world, Mesh(dp=world.size), DEFAULT_GROUP_SPECS, meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, 0)
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda *_: groups.meter.add_event("forward"))
        block.register_full_backward_hook(lambda *_: groups.meter.add_event("backward"))
    engine = Engine(parallelize(model, groups, config), groups, config.optim, 0)
    groups.meter.records.clear()  # the initial broadcast
    batches = Loader(generate_text(4 * SEQ_LEN + 1), SEQ_LEN, 0).micro_batches(
        0, 4, world.rank, world.size, micro_batches
    )
    engine.step(0, batches, 1e-3)
    return groups.meter


def launches_and_block_ends(world, gradients):
    """Ticks of the launches of gradient all-reduces, and of the end of each block's backward."""
    meter = meter_of_one_step(world, gradients)
    sent = [r.launched for r in meter.records if r.name == "all_reduce" and r.group_name == "grads"]
    return sent, [tick for tick, label in meter.events if label == "backward"]


def token_count_and_block_events(world):
    """Ticks of the token count's launch and wait, of the blocks' forwards and of their backwards."""
    meter = meter_of_one_step(world, "bucketed", micro_batches=2)
    [count] = [r for r in meter.records if r.group_name == "loss"]
    places = {label: [tick for tick, name in meter.events if name == label] for label in ("forward", "backward")}
    return count.launched, count.waited, places["forward"], places["backward"]


def test_the_first_bucket_is_launched_before_half_of_backward_is_done(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "bucketed"):
        assert len(ends) == Config().model.num_layers == 4
        assert sent[0] < ends[len(ends) // 2 - 1]  # before the second of four blocks is through


def test_only_the_last_bucket_is_launched_after_the_last_block(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "bucketed"):
        assert sum(tick > ends[-1] for tick in sent) == 1


def test_the_naive_version_launches_nothing_inside_backward(ranks):
    for sent, ends in ranks(launches_and_block_ends, 2, "naive"):
        assert len(ends) == 4
        assert sent[0] > ends[-1]


def test_the_token_count_is_reduced_during_the_first_forward(ranks):
    for launched, waited, forwards, backwards in ranks(token_count_and_block_events, 2):
        blocks = Config().model.num_layers
        assert len(forwards) == len(backwards) == 2 * blocks
        assert launched < forwards[0] < forwards[blocks - 1] < waited < backwards[0]


def test_a_micro_batch_ends_its_backward_before_the_next_forward(ranks):
    for _, _, forwards, backwards in ranks(token_count_and_block_events, 2):
        blocks = Config().model.num_layers
        assert max(backwards[:blocks]) < min(forwards[blocks:])
