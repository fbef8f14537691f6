"""Replacing a symbol reaches everybody who has it, and leaves everything else alone."""

import sys
import traceback
from types import ModuleType

import pytest

from minidist.errors import UserError
from minidist.tools.pieces import SymbolReplacements, read_symbol_source

SOURCE = '''
from dataclasses import dataclass

FACTOR = 2


def double(x, *, plus=0):
    """Twice."""
    return FACTOR * x + plus


class Base:
    def name(self):
        return "base"


class Child(Base):
    def name(self):
        return "child of " + super().name()

    @property
    def size(self):
        return 1

    @staticmethod
    def helper():
        return "helper"


@dataclass(frozen=True)
class Point:
    x: int

    def shifted(self):
        return Point(self.x + 1)
'''


@pytest.fixture
def room():
    """A module of its own, as one that others have imported from."""
    module = ModuleType("a_room")
    sys.modules["a_room"] = module
    exec(compile(SOURCE, "a_room.py", "exec"), vars(module))
    yield module
    del sys.modules["a_room"]


def test_those_who_imported_a_function_earlier_get_the_new_one(room):
    imported, table, pieces = room.double, {"callback": room.double}, SymbolReplacements()
    pieces.replace("a_room:double", "def double(x, *, plus=5):\n    return FACTOR * x * 10 + plus")
    assert imported(1) == table["callback"](1) == room.double(1) == 25
    assert imported is room.double
    assert pieces.reset() == ["a_room:double"] and imported(1) == 2 and imported.__doc__ == "Twice."


def test_instances_of_a_class_get_its_new_methods_and_super_works(room):
    child, pieces = room.Child(), SymbolReplacements()
    pieces.replace(
        "a_room:Child",
        "class Child(Base):\n"
        "    def name(self):\n        return 'new child of ' + super().name()\n"
        "    def extra(self):\n        return 7\n",
    )
    assert child.name() == "new child of base" and child.extra() == 7
    assert not hasattr(child, "size") and isinstance(child, room.Child)
    pieces.reset("a_room:Child")
    assert (child.name(), child.size, child.helper()) == ("child of base", 1, "helper")
    assert not hasattr(child, "extra")


def test_one_method_can_be_replaced_alone(room):
    child, pieces = room.Child(), SymbolReplacements()
    pieces.replace("a_room:Child.helper", "def helper():\n    return 'other'")
    pieces.replace("a_room:Child.size", "def size(self):\n    return 9")
    assert (child.helper(), child.size, child.name()) == ("other", 9, "child of base")
    assert sorted(pieces.reset()) == ["a_room:Child.helper", "a_room:Child.size"]
    assert (child.helper(), child.size) == ("helper", 1)


def test_a_dataclass_keeps_its_identity(room):
    before, pieces = room.Point(1), SymbolReplacements()
    pieces.replace(
        "a_room:Point",
        "@dataclass(frozen=True)\nclass Point:\n    x: int\n"
        "    def shifted(self):\n        return Point(self.x + 100)\n",
    )
    assert before.shifted() == room.Point(101) and type(before.shifted()) is type(before)
    with pytest.raises(Exception, match="cannot assign to field"):
        before.x = 3
    pieces.reset()
    assert before.shifted() == room.Point(2)


def test_replacing_twice_resets_to_the_original(room):
    pieces = SymbolReplacements()
    for value in (1, 2):
        pieces.replace("a_room:double", f"def double(x):\n    return {value}")
    assert room.double(0) == 2 and list(pieces) == ["a_room:double"]
    pieces.reset()
    assert room.double(3) == 6 and list(pieces) == []


def test_a_replacement_may_bring_helpers(room):
    SymbolReplacements().replace("a_room:double", "def mine(x):\n    return -x\n\ndef double(x):\n    return mine(x)")
    assert room.double(3) == -3


def test_a_helper_must_not_have_the_name_of_something_else_in_the_module(room):
    before = dict(vars(room))
    source = "def mine(): pass\n\nclass Base: pass\n\ndef double(x):\n    return Base"
    with pytest.raises(UserError, match="defines Base, which a_room has already; give it another name"):
        SymbolReplacements().replace("a_room:double", source)
    assert dict(vars(room)) == before and room.double(3) == 6
    SymbolReplacements().replace("a_room:double", source, beside=["Base"])  # it is replaced as well, by another call
    assert room.Base is before["Base"] and room.double(3) is room.Base


def test_a_class_keeps_its_bases(room):
    with pytest.raises(UserError, match="a_room:Child inherits from Base, its replacement from object"):
        SymbolReplacements().replace("a_room:Child", "class Child:\n    pass")


def test_a_traceback_shows_the_line_of_the_new_source(room):
    SymbolReplacements().replace("a_room:double", "def double(x):\n    return x / 0  # here\n")
    with pytest.raises(ZeroDivisionError) as error:
        room.double(1)
    assert "return x / 0  # here" in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "name, source, said",
    [
        ("a_room:double", "def triple(x):\n    return 3 * x", "defines no double"),
        ("a_room:double", "class double: pass", "is a function, the new source defines a class"),
        ("a_room:FACTOR", "FACTOR = 3", "is a int; only functions and classes"),
        ("a_room:missing", "", "has no missing; it has Base, Child, Point, dataclass, double"),
        ("a_room", "", "names no piece"),
        ("no_such_room:x", "", "there is no module no_such_room"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(room, name, source, said):
    before, pieces = dict(vars(room)), SymbolReplacements()
    with pytest.raises(UserError, match=said):
        pieces.replace(name, source)
    assert {k: v for k, v in vars(room).items() if k != "triple"} == before and list(pieces) == []
    assert room.double(1) == 2


def test_source_with_an_error_changes_nothing(room):
    pieces = SymbolReplacements()
    with pytest.raises(SyntaxError):
        pieces.replace("a_room:double", "def double(x:\n")
    with pytest.raises(NameError):
        pieces.replace("a_room:double", "def double(x):\n    return 1\nundefined_name")
    assert room.double(1) == 2 and list(pieces) == []


def test_the_source_of_a_piece_of_the_package_is_its_text():
    from minidist.data import partition

    text = read_symbol_source("minidist.data.partition:block_partition")
    assert text.startswith("def block(")
    pieces = SymbolReplacements()
    pieces.replace("minidist.data.partition:block_partition", text)
    assert partition.block_partition(10, 3, 0).tolist() == [0, 1, 2, 3]
    pieces.reset()
