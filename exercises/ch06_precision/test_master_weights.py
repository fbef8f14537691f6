"""Tests of master_weights: the reference keeps every weight in float64; roundings are counted."""

import math

import torch

from exercises.observations import PeakMemory
from exercises.testing import Wrong, expect, test

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((2, 3), (5,), ())
DRAWS = 20_000


def exact(seed=0):
    """Values between 1 and 1.5 that have more digits than 16 bits do."""
    generator = torch.Generator().manual_seed(seed)
    return [1 + torch.rand(shape, generator=generator) / 2 for shape in SHAPES]


def weights_of(answer, dtype=BF16, generator=None):
    """The learner's masters, the parameters, and the values before rounding."""
    values = exact()
    parameters = [torch.nn.Parameter(value.to(dtype)) for value in values]
    return answer.MasterWeights(iter(parameters), iter(values), generator), parameters, values


def named(dtype):
    return str(dtype).removeprefix("torch.")


@test(points=3)
def start_from_unrounded_values(answer):
    """Masters are fp32 copies of the values before they were rounded; they share no memory with anything."""
    for dtype in (BF16, FP16):
        weights, parameters, values = weights_of(answer, dtype)
        case = f"parameters in {named(dtype)}"
        expect("the number of masters", len(weights.masters), len(values), case=case)
        for number, (master, value) in enumerate(zip(weights.masters, values, strict=True)):
            expect(f"the dtype of master {number}", named(master.dtype), "float32", case=case)
            expect(f"master {number}", master, value, case=case)
            expect(f"the parameter of master {number}", parameters[number].detach(), value.to(dtype), case=case)
        weights.masters[0].data.add_(1)
        expect("the values that were given, after a master has changed", values[0], exact()[0], case=case)


@test(points=3)
def small_updates_add_up(answer):
    """Two hundred updates, each too small for the parameters' dtype, move them as far as one 200 times as large."""
    for dtype, update in ((BF16, 2.0**-12), (FP16, 2.0**-15)):
        weights, parameters, values = weights_of(answer, dtype)
        optimizer = torch.optim.SGD(weights.masters, lr=update)
        for step in range(200):
            weights.attach_grads([torch.ones(shape) for shape in SHAPES])
            optimizer.step()
            weights.copy_to_params()
            case = f"{step + 1} updates of {-update}, parameters in {named(dtype)}"
            for number, value in enumerate(values):
                # Multiples of 2**-23 between 1/2 and 2 are exact in float32.
                moved = value.double() - (step + 1) * update
                expect(f"master {number}", weights.masters[number].detach().double(), moved, case=case)
                read = parameters[number].detach()
                expect(f"the dtype of parameter {number}", named(read.dtype), named(dtype), case=case)
                expect(f"parameter {number}, which is its master rounded", read, moved.float().to(dtype), case=case)


@test(points=3)
def gradients_divided_in_float32(answer):
    """Each master's gradient is fp32, and divided by the scale after the conversion; the given ones are unchanged."""
    for dtype in (FP16, BF16, FP32):
        for scale in (1.0, 2.0**16, 3.0):
            weights, _, _ = weights_of(answer)
            given = [(torch.arange(float(math.prod(shape))).view(shape) + 2.0**-20).to(dtype) for shape in SHAPES]
            copies = [gradient.clone() for gradient in given]
            for _ in range(2):  # the second step replaces the gradients of the first
                weights.attach_grads(given, scale)
                case = f"gradients in {named(dtype)}, scale {scale:g}"
                for number, (master, copy) in enumerate(zip(weights.masters, copies, strict=True)):
                    if master.grad is None:
                        raise Wrong("wrong", f"the gradient of master {number} is None", "a tensor", "None")
                    expect(f"the dtype of gradient {number}", named(master.grad.dtype), "float32", case=case)
                    expect(f"gradient {number} of the masters", master.grad, copy.float() / scale, case=case)
                    expect(f"gradient {number} that was given", given[number], copy, case=case)


@test(points=1)
def memory_of_one_copy(answer):
    """The masters take 4 bytes per element, and copying them to the parameters takes 4 more at most."""
    parameter, value = torch.ones(250_000, dtype=BF16), torch.ones(250_000)
    with PeakMemory() as memory:
        weights = answer.MasterWeights([parameter], [value])
    expect("memory that 1 MB of masters take, in MB", memory.peak_bytes / 10**6, 1.0, tolerance=0.1)
    with PeakMemory() as memory:
        weights.copy_to_params()
    expect("at most 1.1 MB to copy the masters to the parameters", memory.peak_bytes / 10**6 <= 1.1, True)


@test(points=3)
def rounds_to_neighbours_at_random(answer):
    """A value becomes one of its two bf16 neighbours, and the nearer one more often, in proportion."""
    generator = torch.Generator().manual_seed(5)
    state = torch.get_rng_state()
    for value, low, high in (
        (1.001, 1.0, 1 + 2.0**-7),
        (-1.003, -1 - 2.0**-7, -1.0),
        (1 + 2.0**-8, 1.0, 1 + 2.0**-7),
        (1000.7, 1000.0, 1004.0),
        (1.25 * 2.0**-20 + 2.0**-28, 1.25 * 2.0**-20, 1.25 * 2.0**-20 + 2.0**-27),
    ):
        values = torch.full((DRAWS // 4, 4), value)
        rounded = answer.round_stochastically(values, generator)
        case = f"{DRAWS:,} times {value}"
        expect("the dtype of the result", named(rounded.dtype), "bfloat16", case=case)
        expect("the shape of the result", list(rounded.shape), list(values.shape), case=case)
        expect("the different results", sorted(rounded.double().unique().tolist()), [low, high], case=case)
        chance = (values[0, 0].item() - low) / (high - low)
        share = (rounded.double() == high).double().mean().item()
        # Five standard deviations of the share of `DRAWS` independent draws.
        off = 5 * math.sqrt(chance * (1 - chance) / DRAWS)
        expect(f"the share of results that are {high}", share, chance, tolerance=off, case=case)
        expect("the values that were given", values, torch.full((DRAWS // 4, 4), value), case=case)
    expect("torch's own random state is unchanged", torch.equal(torch.get_rng_state(), state), True)


@test(points=2)
def keeps_what_bfloat16_represents(answer):
    """Values that bf16 represents, zeros of both signs, infinities and NaN stay what they are."""
    generator = torch.Generator().manual_seed(6)
    numbers = [0.0, -0.0, 1.0, -1.5, 1.0078125, 2.0**-130, -(2.0**100), 3.3895313892515355e38, math.inf, -math.inf]
    for _ in range(20):
        rounded = answer.round_stochastically(torch.tensor(numbers), generator)
        expect("the rounded values", rounded.float(), torch.tensor(numbers), case=f"{numbers}")
        expect("the signs of the zeros", torch.signbit(rounded[:2]).tolist(), [False, True])
        # The first and the last bit pattern of a NaN, of both signs, and the usual one.
        patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1, 0x7FC00000], dtype=torch.int32)
        rounded = answer.round_stochastically(patterns.view(torch.float32), generator)
        expect("which of five NaN are NaN after rounding", rounded.isnan().tolist(), [True] * 5)


@test(points=1)
def parameters_are_rounded_by_the_generator(answer):
    """With a generator the parameters are rounded at random, differently in each step, and the masters are not."""
    means = []
    for seed in (1, 1, 2):
        parameter, value = torch.ones(DRAWS, dtype=BF16), torch.full((DRAWS,), 1 + 2.0**-9)
        weights = answer.MasterWeights([parameter], [value], torch.Generator().manual_seed(seed))
        read = []
        for _ in range(2):
            weights.copy_to_params()
            read.append(parameter.clone())
        up = (read[0] != 1).double().mean().item()
        off = 5 * math.sqrt(0.25 * 0.75 / DRAWS)  # five standard deviations
        expect("the share of parameters rounded up, a quarter of the spacing below", up, 0.25, tolerance=off)
        expect("the masters", weights.masters[0], value)
        expect("whether two steps are rounded equally", torch.equal(*read), False)
        means.append(read[0])
    expect("whether equal generators round equally", torch.equal(means[0], means[1]), True)
    expect("whether other generators round equally", torch.equal(means[0], means[2]), False)
