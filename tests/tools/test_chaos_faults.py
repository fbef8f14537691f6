"""Faults to inject: their text, and what they do to a rank."""

import pytest
import torch

from minidist.errors import UserError
from minidist.tools.chaos.faults import KINDS, PHASES, Fault, parse_fault
from minidist.tools.chaos.injector import execute_fault, flip_bit_of_first_element


def test_a_fault_is_read_as_it_is_written():
    fault = Fault("kill", 1, 3, "update")
    assert str(fault) == "kill rank 1 at step 3 in update" and parse_fault(" Kill rank 1 at step 3 in update") == fault
    for kind, phases in KINDS.items():
        for phase in phases:
            fault = Fault(kind, 0, 2, phase)
            assert parse_fault(str(fault), 1) == fault
    assert {phase for phases in KINDS.values() for phase in phases} == set(PHASES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill rank 1", 'write it like "kill rank 1 at step 3 in update"'),
        ("kil rank 1 at step 3 in update", "there is no fault 'kil'; did you mean kill?"),
        ("nan rank 1 at step 3 in rename", "'nan' cannot be injected in 'rename'; possible: backward, agree."),
        ("kill rank 1 at step 0 in update", "the first step is step 1"),
        ("kill rank 2 at step 3 in update", "names rank 2; the run has ranks 0 to 1"),
        ("kill rank 1 at step 3 in rename", "only rank 0 renames"),
    ],
)
def test_an_impossible_fault_is_refused(text, message):
    with pytest.raises(UserError) as refused:
        parse_fault(text, 2)
    assert message in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_one_element_flips(dtype):
    tensor = torch.tensor([1.5, 2.0], dtype=dtype)
    flip_bit_of_first_element(tensor, 0)  # the sign
    assert tensor.tolist() == [-1.5, 2.0]
    flip_bit_of_first_element(tensor, 0)
    flip_bit_of_first_element(tensor)  # a bit of the exponent: another power of two
    ratio = tensor[0].item() / 1.5
    assert ratio != 1 and torch.log2(torch.tensor(ratio, dtype=torch.float64)) % 1 == 0 and tensor[1] == 2.0


def test_a_flipped_bit_is_not_seen_by_autograd():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    execute_fault(Fault("flip", 0, 1, "backward"), lambda: {"w": weight}, dict)
    loss.backward()  # raises if autograd has noticed the change
    assert weight[0] != 1 and torch.equal(weight[1:], torch.ones(2))


def test_nan_and_a_full_disk():
    gradient = torch.zeros(2, 3)
    execute_fault(Fault("nan", 0, 1, "agree"), dict, lambda: {"a": None, "b": gradient, "c": torch.zeros(1)})
    assert gradient.isnan().sum() == 1
    with pytest.raises(OSError, match="No space left"):
        execute_fault(Fault("full", 0, 1, "write"), dict, dict)
