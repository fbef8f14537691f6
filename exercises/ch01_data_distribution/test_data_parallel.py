"""Tests of data_parallel: gradients whose sums are exact in any order; the reference is autograd in one process."""

import math

import torch
from torch import nn

from exercises.conditions import check_conditions
from exercises.reducer_run import declare_reducer, grad_of, local_gradient
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_reduce
from minidist.parameters import named_parameters

SHAPES = {"weight": (20, 3), "bias": (3,), "scale": ()}


class Net(nn.Module):
    """Parameters whose initial values differ by rank; selected ranks use `rare`, none uses `never`."""

    def __init__(self, rank, dtype=torch.float32):
        super().__init__()
        for name, shape in {"rare": (2,), **SHAPES, "never": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))


def gradient(name, rank, step=0, dtype=torch.float32):
    return local_gradient(name, SHAPES[name], rank, step, dtype)


def total(name, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(gradient(name, rank, step, dtype) for rank in range(world.size))


def reducer_of(answer, world, network, dtype=torch.float32, num_micro_batches=1):
    """Return the learner's reducer of this rank's parameters, and the parameters by name."""
    parameters = named_parameters(Net(world.rank, dtype))
    return answer.NaiveReducer(parameters, parameters, network.group, num_micro_batches), parameters


def run_step(reducer, world, step=0, dtype=torch.float32):
    """Add this rank's gradients, in another order on every other rank, and call finish()."""
    for name in reversed(SHAPES) if world.rank % 2 else SHAPES:
        reducer.add(name, gradient(name, world.rank, step, dtype))
    reducer.finish()


# -- broadcast_model --------------------------------------------------------------------------------------------------


def model_to_broadcast(rank):
    """A frozen and a tied parameter, and buffers of many kinds, with values that differ by rank."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("mask", torch.zeros(2), persistent=False)  # as of a model that computes its buffers anew
    model.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    model.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))
    model.register_buffer("is_set", torch.zeros(2, dtype=torch.bool))
    model.register_buffer("nothing", torch.zeros(0))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        tensor.data.copy_((torch.arange(tensor.numel()) + 20 * rank + number + 1).reshape(tensor.shape))
    model.tokens_seen += 2**40  # more digits than float32 has
    model.mean += 2.0**-40
    model.is_set.copy_(torch.tensor([rank % 2 == 0, rank > 1]))
    return model


def values(model):
    return [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]


@test(points=4, ranks=(1, 4))
def replicas_start_equal(answer, world, network):
    """All parameters, frozen ones included, and all buffers, also non-persistent ones, are those of group rank 0."""
    model = model_to_broadcast(world.rank)
    before = [(id(tensor), tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())]
    answer.broadcast_model(model, network.group)
    expect("the parameters and buffers", values(model), values(model_to_broadcast(0)))
    after = [(id(tensor), tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())]
    expect("whether the model's tensors are still the same", after == before, True)
    expect("parameters that require a gradient", [p.requires_grad for p in model.parameters()].count(False), 1)
    if world.size == 4:
        first = network.divided_group.ranks[0]
        model = model_to_broadcast(world.rank)
        answer.broadcast_model(model, network.divided_group)
        case = f"a group of ranks {list(network.divided_group.ranks)}"
        expect("the parameters and buffers", values(model), values(model_to_broadcast(first)), case=case)


# -- register_gradient_hooks ------------------------------------------------------------------------------------------


class Used(nn.Module):
    """`rare` is used by selected micro-batches, `never` by none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.0, -1.0]], dtype=torch.float64))
        self.rare = nn.Parameter(torch.tensor([2.0, 1.0], dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x, rare=False):
        """(b, 3) -> a loss sum. All its values are multiples of 2**-33, so that sums are exact in any order."""
        hidden = x @ self.weight.T
        loss = hidden.square().sum()
        return loss + (hidden @ self.rare).sum() + self.weight.sum() if rare else loss  # the weight is used twice


def data(rank, micro_batch):
    """(2 + rank, 3) numbers that differ by rank and micro-batch, with more digits than float32 has."""
    numbers = torch.arange(3.0 * (2 + rank), dtype=torch.float64).reshape(-1, 3)
    return (numbers + 2 * rank + micro_batch) % 5 - 2 + 2.0**-16


def gradients_of(ranks, rare):
    """The gradients of all micro-batches of these ranks, in one backward."""
    model = Used()
    sum(model(data(rank, i), uses) for rank in ranks for i, uses in enumerate(rare)).backward()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}


@test(points=3)
def each_backward_adds_its_gradients(answer, world, network):
    """Every backward calls add() once for each parameter that it used, with the gradient of this micro-batch."""
    model, calls = Used(), []
    answer.register_gradient_hooks(named_parameters(model), lambda name, grad: calls.append((name, grad.tolist())))
    for index, rare in enumerate((True, False, True)):
        calls.clear()
        model(data(0, index), rare).backward()
        alone = Used()
        alone(data(0, index), rare).backward()
        wanted = [(name, p.grad.tolist()) for name, p in alone.named_parameters() if p.grad is not None]
        expect(f"the calls of add() in micro-batch {index}", sorted(calls), sorted(wanted))
    calls.clear()
    (model(torch.zeros(2, 3, dtype=torch.float64), True) * 1).backward()
    expect("the names, if all gradients are zero", sorted(name for name, _ in calls), ["rare", "weight"])
    adds_inside_backward(answer)


def adds_inside_backward(answer):
    """The gradient of the last layer is added before backward reaches the first one."""
    layers, happened = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), []
    answer.register_gradient_hooks(named_parameters(layers), lambda name, grad: happened.append(f"add {name}"))
    hidden = layers[0](torch.ones(1, 2))
    hidden.register_hook(lambda grad: happened.append("backward of layer 0"))
    layers[1](hidden).sum().backward()
    happened.append("backward is over")
    expected = ["add 1.weight", "backward of layer 0", "add 0.weight", "backward is over"]
    expect("what happens in a backward", happened, expected, case="a model of two layers")


@test(points=2)
def grad_is_none_after_backward(answer, world, network):
    """After every backward `.grad` is None, so the gradient exists only once; hooks of two models are independent."""
    model, other, calls, others = Used(), Used(), [], []
    answer.register_gradient_hooks(named_parameters(model), lambda name, grad: calls.append(name))
    answer.register_gradient_hooks(named_parameters(other), lambda name, grad: others.append(name))
    for index in range(2):
        model(data(0, index), True).backward()
        left = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        expect("parameters with a .grad after a backward", left, [])
    other(data(0, 0)).backward()
    expect("the calls of add() of the first model", sorted(calls), ["rare", "rare", "weight", "weight"])
    expect("the calls of add() of the second model", others, ["weight"])


# -- NaiveReducer -----------------------------------------------------------------------------------------------------


@test(points=4, ranks=(1, 3))
def sums_over_ranks(answer, world, network):
    """After finish() every rank has the sum of all ranks' gradients, in the dtype of the masters."""
    for dtype in (torch.float32, torch.float64):
        reducer, parameters = reducer_of(answer, world, network, dtype)
        run_step(reducer, world, dtype=dtype)
        for name, shape in SHAPES.items():
            expected = total(name, world, dtype=dtype).tolist()
            expect(f"the {str(dtype)[6:]} gradient of {name}", grad_of(parameters, name), expected)
            expect(f"the parameter {name}", parameters[name], torch.full(shape, 0.5 + world.rank))


@test(points=3, ranks=(2,))
def micro_batches_add_up(answer, world, network):
    """A gradient that comes in several parts, of which rank 0 has more than rank 1, is the sum of all of them."""
    reducer, parameters = reducer_of(answer, world, network, num_micro_batches=3)
    parts = {rank: 3 - rank for rank in range(world.size)}
    for name in SHAPES:
        for part in range(parts[world.rank]):
            mine = gradient(name, world.rank, part)
            reducer.add(name, mine)
            expect(f"the gradient of {name} that was added", mine, gradient(name, world.rank, part))
    reducer.finish()
    for name in SHAPES:
        expected = sum(gradient(name, rank, part) for rank, count in parts.items() for part in range(count))
        expect(f"the gradient of {name}, of 3 and 2 micro-batches", grad_of(parameters, name), expected.tolist())
        is_sum = parameters[name].grad.data_ptr() == reducer.sums[name].data_ptr()
        expect(f"whether .grad of {name} is the tensor in `sums`, not a copy", is_sum, True)
    counts_gradients(reducer, parameters, parts[world.rank])
    reducer.clear()
    counts_gradients(reducer, parameters, 0)
    for _ in range(128):
        reducer.add("scale", torch.ones(()))
    reducer.finish()
    expect("the gradient of scale, of 128 micro-batches per rank", grad_of(parameters, "scale"), 128.0 * world.size)


def counts_gradients(reducer, parameters, count):
    """The reducer has counted so many gradients of each parameter in SHAPES, and none of others."""
    for name in parameters:
        wanted = count if name in SHAPES else 0
        expect(f"num_added of {name}, after {wanted} gradients in this step", int(reducer.num_added[name]), wanted)


@test(points=3, ranks=(2,))
def steps_are_independent(answer, world, network):
    """A step contains nothing of the steps before it, of another reducer, or of a NaN in an aborted step."""
    reducer, parameters = reducer_of(answer, world, network)
    other, others_parameters = reducer_of(answer, world, network)
    for step in range(3):
        if step == 1:  # aborted before finish()
            reducer.add("weight", gradient("weight", world.rank))
            reducer.add("bias", torch.tensor([math.nan, math.inf, 1.0]))
            other.add("weight", gradient("weight", world.rank, 7))
        else:
            run_step(reducer, world, step)
            for name in SHAPES:
                what = f"the gradient of {name} in step {step + 1}"
                expect(what, grad_of(parameters, name), total(name, world, step).tolist())
        reducer.clear()
        left = [name for name in parameters if parameters[name].grad is not None]
        expect("parameters with a .grad after clear()", left, [])
    other.finish()
    expected = total("weight", world, 7).tolist()
    expect("the gradient of a second reducer's weight", grad_of(others_parameters, "weight"), expected)


@test(points=3, ranks=(2,))
def unused_parameters(answer, world, network):
    """A parameter that one micro-batch of one rank used gets its gradient on all ranks; an unused one keeps None."""
    reducer, parameters = reducer_of(answer, world, network, num_micro_batches=2)
    for step, numbers in enumerate(([3.0, 4.0], [0.0, 0.0], [5.0, 6.0])):
        user = (world.size - 1 + step) % world.size  # another rank in each step
        if world.rank == user:
            reducer.add("rare", torch.tensor(numbers))
        run_step(reducer, world, step)
        what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
        expect(what, grad_of(parameters, "rare"), numbers)
        expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
        reducer.clear()
    run_step(reducer, world)
    expect("the gradient of a parameter used in earlier steps only", grad_of(parameters, "rare"), None)
    reducer.clear()
    if world.rank == 0:
        run_step(reducer, world)
    else:
        reducer.finish()
    what = "the gradient of weight, if only rank 0 has added gradients"
    expect(what, grad_of(parameters, "weight"), gradient("weight", 0).tolist())


@test(points=2, ranks=(2,))
def masters_wider_than_parameters(answer, world, network):
    """With float32 masters of bfloat16 parameters, sums are in float32, and `.grad` is set on the masters only."""
    parameters = named_parameters(Net(world.rank, torch.bfloat16))
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
    reducer = answer.NaiveReducer(parameters, masters, network.group, 2)
    for part in (1.0, 2.0**-10):  # bfloat16 has eight digits: it cannot represent their sum
        reducer.add("bias", torch.full((3,), part * (1 + world.rank), dtype=torch.bfloat16))
    reducer.finish()
    factor = sum(1 + rank for rank in range(world.size))
    expect("the gradient of the master of bias", grad_of(masters, "bias"), [factor * (1 + 2.0**-10)] * 3)
    expect("the dtype of that gradient", str(masters["bias"].grad.dtype), "torch.float32")
    left = [name for name, parameter in parameters.items() if parameter.grad is not None]
    expect("parameters with a .grad", left, [])
    reducer.clear()
    left = [name for name, master in masters.items() if master.grad is not None]
    expect("masters with a .grad after clear()", left, [])


@test(points=3, ranks=(2,))
def nothing_more_is_sent(answer, world, network):
    """Each gradient is all-reduced once, after backward, with at most 16 more bytes per parameter."""
    reducer, parameters = reducer_of(answer, world, network)
    reducer.add("weight", gradient("weight", world.rank))
    expect("messages before finish()", len(network.records), 0)
    reducer.clear()
    run_step(reducer, world)
    names = sorted({record.name for record in network.records})
    expect("the operations sent", names, ["all_reduce"])
    payload = sum(record.payload_bytes for record in network.records)
    least = sum(parameters[name].numel() * 4 for name in SHAPES)  # nothing need be sent of an unused parameter
    most = sum(parameter.numel() * 4 for parameter in parameters.values()) + 16 * len(parameters)
    expect(f"between {least} and {most} bytes reduced (counted: {payload})", least <= payload <= most, True)
    count, enough = len(network.records), 2 * len(parameters)
    expect(f"at most {enough} messages for {len(parameters)} parameters (counted: {count})", count <= enough, True)


@test(points=2, ranks=(2,))
def a_reducer_that_inherits(answer, world, network):
    """A subclass whose sums are views of one tensor, which it reduces itself, as later reducers do."""

    class OneTensor(answer.NaiveReducer):
        def allocate_sums(self):
            sizes = [self.masters[name].numel() for name in self.parameters]
            self.flat = torch.zeros(sum(sizes))
            views = zip(self.parameters, self.flat.split(sizes), strict=True)
            return {name: view.view(self.masters[name].shape) for name, view in views}

        def reduce_sums(self):
            all_reduce(self.flat, self.group)

    parameters = named_parameters(Net(world.rank))
    reducer = OneTensor(parameters, parameters, network.group)
    for step in range(2):
        before = len(network.records)
        run_step(reducer, world, step)
        for name in SHAPES:
            what = f"the gradient of {name} in step {step + 1}"
            expect(what, grad_of(parameters, name), total(name, world, step).tolist())
        expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
        size = 4 * sum(parameter.numel() for parameter in parameters.values())
        sent = [record.payload_bytes for record in network.records[before:]]
        expect(f"messages of {size} bytes, those of the flat tensor (counted: {sent})", sent.count(size), 1)
        expect("all other messages together have at most 16 bytes per parameter", sum(sent) - size <= 80, True)
        expect("bytes of the first message of finish(), that of reduce_sums()", sent[0], size)
        reducer.clear()

    class SomeMasters(answer.NaiveReducer):  # as with ZeRO, where each rank has other masters
        def allocate_sums(self):
            self.totals = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
            return {name: self.totals[name] for name in self.masters}

        def add(self, name, gradient):
            self.num_added[name] += 1
            self.totals[name] += gradient

        def reduce_sums(self):
            for each in self.totals.values():
                all_reduce(each, self.group)

    parameters = named_parameters(Net(world.rank))
    mine = (("weight", "never"), ("rare", "scale"))[world.rank]
    reducer = SomeMasters(parameters, {name: parameters[name] for name in mine}, network.group)
    run_step(reducer, world)
    case = f"a subclass with masters of {mine[0]} and {mine[1]} on this rank, and of two other parameters on the other"
    for name in parameters:
        expected = total(name, world).tolist() if name in SHAPES and name in mine else None
        expect(f"the gradient of {name}", grad_of(parameters, name), expected, case=case)


# -- all together -----------------------------------------------------------------------------------------------------


def model_of(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def samples(rank):
    """This rank's two micro-batches, of 3 + rank and 2 samples."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in (3 + rank, 2)]


@test(points=5, ranks=(1, 2, 3, 4))
def trains_like_one_process(answer, world, network):
    """Two steps of two micro-batches, from different starting values: gradients and parameters of one process."""
    count = sum(len(x) for rank in range(world.size) for x in samples(rank))
    model, alone = model_of(world.rank), model_of(0)
    answer.broadcast_model(model, network.group)
    parameters = named_parameters(model)
    reducer = answer.NaiveReducer(parameters, parameters, network.group, 2)
    answer.register_gradient_hooks(parameters, reducer.add)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, alone)]
    every = torch.cat([x for rank in range(world.size) for x in samples(rank)])
    for step in range(2):
        reducer.clear()
        for x in samples(world.rank):
            (model(x).square().sum() / count).backward()
        reducer.finish()
        optimizers[1].zero_grad()
        (alone(every).square().sum() / count).backward()
        for name, parameter in alone.named_parameters():
            what = f"the gradient of {name} in step {step + 1}, compared with one process"
            expect(what, parameters[name].grad, parameter.grad, tolerance=1e-13)
        for optimizer in optimizers:
            optimizer.step()
        reducer.update_parameters()
        for name, parameter in alone.named_parameters():
            what = f"the parameter {name} after step {step + 1}, compared with one process"
            expect(what, parameters[name], parameter, tolerance=1e-9)


def make_reducer(answer, parameters, group):
    return answer.NaiveReducer(parameters, parameters, group)


DECLARATION = declare_reducer(make_reducer)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype and size, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
