"""Sets and hashes of an answer, which differ between ranks as between interpreters."""

import pickle

import pytest

from exercises.interpreters import interpreter, load_answer_file
from exercises.testing import expect

TEXT = '''
NAMES = {"grads", "tensor", "context"}


class Kinds(set):
    """A set of the answer's own."""


def orders():
    made = {name.upper() for name in NAMES}
    return [list(each) for each in (NAMES, made, set(NAMES), frozenset(NAMES), NAMES | {"heads"}, made.union("ab"))]


def pairs():
    return [[*{("dp", 1), ("tp", 0)}], [*{None, "dp"}]]


def numbers():
    return [[*{3, 1, 2}], [*{(2, 0), (1, 5)}], hash(7)]
'''


@pytest.fixture
def answer(tmp_path):
    file = tmp_path / "answer.py"
    file.write_text(TEXT)
    return load_answer_file("answer", str(file), rank=0)


def test_the_order_of_texts_differs_between_two_interpreters(answer):
    for get in (answer.orders, answer.pairs):
        here, again = get(), get()
        with interpreter(1):
            there = get()
        assert here == again
        for one, other in zip(here, there, strict=True):
            assert one != other
            assert set(one) == set(other)


def test_the_order_of_numbers_is_the_same_everywhere(answer):
    with interpreter(1):
        there = answer.numbers()
    assert answer.numbers() == there == [[*{3, 1, 2}], [*{(2, 0), (1, 5)}], 7]


def test_a_hash_differs_between_two_interpreters(answer):
    with interpreter(1):
        there = answer.hash("dp")
    assert answer.hash("dp") == answer.hash("dp") != there


def test_sets_of_an_answer_are_sets(answer):
    made = answer.set
    assert isinstance(answer.NAMES, set)
    assert isinstance({1}, made)
    assert not isinstance(frozenset(), made)
    assert isinstance(answer.Kinds(), made)
    assert not isinstance({1}, answer.Kinds)
    assert sorted(answer.NAMES) == ["context", "grads", "tensor"]
    assert type(pickle.loads(pickle.dumps(answer.NAMES))) is set
    assert repr(made()) == "set()"
    assert repr(made([1])) == "{1}"
    assert repr(answer.frozenset([1])) == "frozenset({1})"
    popped = made(["dp", "tp"])
    assert {popped.pop(), popped.pop()} == {"dp", "tp"}
    with pytest.raises(KeyError):
        popped.pop()
    expect("the names", answer.NAMES, {"grads", "tensor", "context"})


def test_a_traceback_has_the_lines_of_the_file(answer):
    assert answer.pairs.__code__.co_firstlineno == TEXT[: TEXT.index("def pairs")].count("\n") + 1
