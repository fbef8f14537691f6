"""Tests of master_weights: the reference keeps every weight in float64, and rounds a copy of it."""

import torch

from exercises.observations import PeakMemory
from exercises.testing import expect, test
from minidist.comm import all_gather
from minidist.precision.dtypes import PrecisionDtypes

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUNDS = {"first": (0, 5), "second": (6, 9)}  # of a piece of 11 elements; element 5 and the last two are padding


def dtypes(parameter=BF16, master=FP32):
    """parameter: what the model reads; master: None where masters do not last."""
    return PrecisionDtypes(parameter, FP32, FP32, state=master or FP32, master=master)


def exact(seed=0, bounds=BOUNDS):
    """Values near 1 that have more digits than 16 bits do."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 1 + torch.rand(stop - start, generator=generator) / 2 for name, (start, stop) in bounds.items()}


def piece(values, dtype=BF16, bounds=BOUNDS, numel=11):
    """The memory that the model reads: the values rounded; padding is 0."""
    part = torch.zeros(numel, dtype=dtype)
    for name, (start, stop) in bounds.items():
        part[start:stop] = values[name].to(dtype)
    return part


def masters_of(answer, dtype=BF16, master=FP32, rounding=None):
    """The learner's masters of a piece, the piece, and the values before rounding."""
    values = exact()
    part = piece(values, dtype)
    return answer.MasterWeights(part, BOUNDS, values, dtypes(dtype, master), rounding=rounding), part, values


def same_memory(one, other):
    return one.data_ptr() == other.data_ptr()


@test(points=3)
def start_from_unrounded_values(answer):
    """Masters are a copy in the wider format, equal to the values before they were rounded; padding is 0."""
    for dtype, wide in ((BF16, FP32), (FP16, FP32), (BF16, FP64), (FP32, FP64)):
        masters, part, values = masters_of(answer, dtype, wide)
        case = f"parameters in {dtype}, masters in {wide}".replace("torch.", "")
        expect("the format of the masters", str(masters.tensor.dtype), str(wide), case=case)
        for name, (start, stop) in BOUNDS.items():
            expect(f"the masters of {name}", masters.views[name], values[name], case=case)
            expect(f"the same as a slice of `tensor`: {name}", masters.tensor[start:stop], values[name], case=case)
            there = same_memory(masters.views[name], masters.tensor[start:])
            expect(f"whether the view of {name} lies in `tensor`", there, True, case=case)
        padding = [masters.tensor[index].item() for index in (5, 9, 10)]
        expect("what is between the parameters and behind them", padding, [0.0] * 3, case=case)
        expect("the piece that the model reads", part, piece(values, dtype), case=case)


@test(points=3)
def small_updates_add_up(answer):
    """Two hundred updates, each too small for the parameter's format, move it as far as one 200 times as large."""
    for dtype, update in ((BF16, 2.0**-12), (FP16, 2.0**-15)):
        masters, part, values = masters_of(answer, dtype)
        for step in range(200):
            masters.attach_grads(torch.ones(11))
            for view in masters.views.values():
                view.data -= update * view.grad
            masters.copy_to_params(step)
            masters.detach_grads()
            # Multiples of 2**-23 between 1/2 and 2 are exact in float32.
            moved = {name: value.double() - (step + 1) * update for name, value in values.items()}
            for name, (start, stop) in BOUNDS.items():
                case = f"{step + 1} updates of {-update}, {dtype}".replace("torch.", "")
                expect(f"the masters of {name}", masters.views[name], moved[name], case=case)
                read, kept = part[start:stop], masters.views[name].to(dtype)
                expect(f"what the model reads of {name}: its masters, rounded", read, kept, case=case)
    expect("the piece's padding", [part[index].item() for index in (5, 9, 10)], [0.0] * 3)


@test(points=3)
def gradients_in_the_masters_dtype(answer):
    """Each master that was used has its slice of the gradients, in the masters' format, while the update is open."""
    gradients = torch.arange(1.0, 12.0)
    for dtype in (BF16, FP32):
        masters, _, _ = masters_of(answer)
        for unused in ((), ("second",), ("first", "second")):
            masters.attach_grads(gradients.to(dtype), unused)
            for name, (start, stop) in BOUNDS.items():
                grad = masters.views[name].grad
                case = f"gradients in {dtype}, unused: {list(unused)}".replace("torch.", "")
                wanted = None if name in unused else gradients[start:stop].tolist()
                expect(f"the gradient of {name}", None if grad is None else grad.tolist(), wanted, case=case)
                if grad is not None:
                    expect(f"the format of the gradient of {name}", str(grad.dtype), "torch.float32", case=case)
            masters.detach_grads()


@test(points=2)
def no_copy_of_equal_dtype(answer):
    """With parameters in the masters' format, the masters are the piece itself, and gradients are not copied either."""
    for dtype in (FP32, FP64):
        gradients = torch.ones(11, dtype=dtype)
        masters, part, values = masters_of(answer, dtype, dtype)
        case = f"everything in {dtype}".replace("torch.", "")
        expect("whether `tensor` is the piece's own memory", same_memory(masters.tensor, part), True, case=case)
        masters.attach_grads(gradients)
        for name, (start, stop) in BOUNDS.items():
            expect(f"whether {name} lies in it", same_memory(masters.views[name], part[start:]), True, case=case)
            there = same_memory(masters.views[name].grad, gradients[start:])
            expect(f"whether the gradient of {name} is what was given", there, True, case=case)
            masters.views[name].data -= 0.25 * masters.views[name].grad
        masters.copy_to_params()
        masters.detach_grads()
        moved = {name: value - 0.25 for name, value in values.items()}
        expect("the piece after an update", part, piece(moved, dtype), case=case)
    part = torch.ones(250_000)
    with PeakMemory() as memory:
        masters = answer.MasterWeights(part, {"all": (0, 250_000)}, {"all": part}, dtypes(FP32))
        masters.attach_grads(part)
        masters.copy_to_params()
    expect("memory taken for 1 MB of masters in the parameters' format, in MB", memory.peak_bytes // 10**6, 0)


@test(points=2)
def memory_of_one_copy(answer):
    """Masters of their own take 4 bytes per element; an update with float32 gradients takes none."""
    part = torch.ones(250_000, dtype=BF16)
    values, gradients = {"all": torch.ones(250_000)}, torch.ones(250_000)
    with PeakMemory() as memory:
        masters = answer.MasterWeights(part, {"all": (0, 250_000)}, values, dtypes())
        masters.attach_grads(gradients)
        masters.copy_to_params()
        masters.detach_grads()
    expect("memory taken for 1 MB of masters, in MB", memory.peak_bytes / 10**6, 1.0, tolerance=0.1)


@test(points=1)
def rounds_masters_that_do_not_last(answer):
    """Masters that are not persistent exist during an update only, and `rounding` writes them back."""
    calls = []

    def rounding(values, into, step, name):
        calls.append((name, step, values.tolist()))
        into.copy_(values)

    masters, part, values = masters_of(answer, master=None, rounding=rounding)
    for step in (3, 4):
        before = piece(values).float() if step == 3 else part.float()
        expect("bytes of masters between updates", masters.tensor.untyped_storage().nbytes(), 0)
        masters.attach_grads(torch.ones(11))
        for view in masters.views.values():
            view.data -= 0.25 * view.grad
        masters.copy_to_params(step)
        wanted = [(name, step, (before[start:stop] - 0.25).tolist()) for name, (start, stop) in BOUNDS.items()]
        expect("what `rounding` was called with: (name, step, values)", sorted(calls), wanted)
        masters.detach_grads()
        expect("the piece after the update", part[:5], before[:5] - 0.25)
        calls.clear()


@test(points=2, ranks=(1, 2, 3, 4))
def each_rank_updates_its_shard(answer, world, network):
    """Each rank updates its shard of a row; gathered, the row is that of one process with masters for all of it."""
    sizes, numel = {"embed": 7, "norm": 3, "head": 6}, 16
    shard = -(-numel // world.size)
    row, values, bounds, start = torch.zeros(shard * world.size, dtype=BF16), {}, {}, 0
    whole = torch.cat(list(exact(7, {name: (0, size) for name, size in sizes.items()}).values()))
    row[:numel] = whole
    begin, end = shard * world.rank, shard * (world.rank + 1)
    for name, size in sizes.items():
        low, high = max(start, begin), min(start + size, end)
        if low < high:
            bounds[name], values[name] = (low - begin, high - begin), whole[low:high]
        start += size
    part = row[begin:end]
    masters, expected = answer.MasterWeights(part, bounds, values, dtypes()), whole.double()
    for step in range(20):
        gradients = (1 + 32 * torch.arange(float(row.numel()))) * 2.0 ** -(20 + step % 3)
        masters.attach_grads(gradients[begin:end])
        for view in masters.views.values():
            view.data -= view.grad
        masters.copy_to_params(step)
        masters.detach_grads()
        expected = expected - gradients[:numel].double()
        all_gather(row, part, network.group)
    # Multiples of 2**-23 between 1/2 and 2 are exact in float32.
    flat = expected.tolist() + [0.0] * (row.numel() - numel)
    for name, (start, stop) in bounds.items():
        wanted = flat[begin + start : begin + stop]
        expect(f"the masters of {name} after 20 steps", masters.views[name], wanted, case=f"rank {world.rank}")
    what, case = "the row after 20 steps, on every rank", f"{world.size} shards of {shard}"
    expect(what, row[:numel].float(), expected.float().to(BF16).float(), case=case)
