"""Replacing a symbol of the package changes every reference to it, and nothing else."""

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
def module():
    """A new module from which other code has imported."""
    module = ModuleType("a_module")
    sys.modules["a_module"] = module
    exec(compile(SOURCE, "a_module.py", "exec"), vars(module))
    yield module
    del sys.modules["a_module"]


def test_earlier_imports_of_a_function_get_the_replacement(module):
    imported, table, pieces = module.double, {"callback": module.double}, SymbolReplacements()
    pieces.replace_symbol("a_module:double", "def double(x, *, plus=5):\n    return FACTOR * x * 10 + plus")
    assert imported(1) == table["callback"](1) == module.double(1) == 25
    assert imported is module.double
    assert pieces.restore_symbols() == ["a_module:double"] and imported(1) == 2 and imported.__doc__ == "Twice."


def test_instances_of_a_class_get_its_new_methods_and_super_works(module):
    child, pieces = module.Child(), SymbolReplacements()
    pieces.replace_symbol(
        "a_module:Child",
        "class Child(Base):\n"
        "    def name(self):\n        return 'new child of ' + super().name()\n"
        "    def extra(self):\n        return 7\n",
    )
    assert child.name() == "new child of base" and child.extra() == 7
    assert not hasattr(child, "size") and isinstance(child, module.Child)
    pieces.restore_symbols("a_module:Child")
    assert (child.name(), child.size, child.helper()) == ("child of base", 1, "helper")
    assert not hasattr(child, "extra")


def test_one_method_can_be_replaced_alone(module):
    child, pieces = module.Child(), SymbolReplacements()
    pieces.replace_symbol("a_module:Child.helper", "def helper():\n    return 'other'")
    pieces.replace_symbol("a_module:Child.size", "def size(self):\n    return 9")
    assert (child.helper(), child.size, child.name()) == ("other", 9, "child of base")
    assert sorted(pieces.restore_symbols()) == ["a_module:Child.helper", "a_module:Child.size"]
    assert (child.helper(), child.size) == ("helper", 1)


def test_a_dataclass_keeps_its_identity(module):
    before, pieces = module.Point(1), SymbolReplacements()
    pieces.replace_symbol(
        "a_module:Point",
        "@dataclass(frozen=True)\nclass Point:\n    x: int\n"
        "    def shifted(self):\n        return Point(self.x + 100)\n",
    )
    assert before.shifted() == module.Point(101) and type(before.shifted()) is type(before)
    with pytest.raises(Exception, match="cannot assign to field"):
        before.x = 3
    pieces.restore_symbols()
    assert before.shifted() == module.Point(2)


def test_symbols_of_one_source_may_share_a_helper(module):
    source = """
def helper(x):
    return 10 * x

def double(x, *, plus=0):
    return helper(x) + plus

class Child(Base):
    def name(self):
        return helper("child ")
"""
    pieces, names = SymbolReplacements(), ["double", "Child"]
    for name in names:
        pieces.replace_symbol(f"a_module:{name}", source, also_replaced=names)
    assert module.double(1) == 10 and module.Child().name() == "child " * 10
    with pytest.raises(UserError, match="defines helper, which a_module has already"):
        pieces.replace_symbol("a_module:double", source.replace("10", "11"), also_replaced=names)


def test_replacing_twice_resets_to_the_original(module):
    pieces = SymbolReplacements()
    for value in (1, 2):
        pieces.replace_symbol("a_module:double", f"def double(x):\n    return {value}")
    assert module.double(0) == 2 and list(pieces) == ["a_module:double"]
    pieces.restore_symbols()
    assert module.double(3) == 6 and list(pieces) == []


def test_a_replacement_may_bring_helpers(module):
    SymbolReplacements().replace_symbol(
        "a_module:double", "def mine(x):\n    return -x\n\ndef double(x):\n    return mine(x)"
    )
    assert module.double(3) == -3


def test_a_helper_must_not_have_the_name_of_something_else_in_the_module(module):
    before = dict(vars(module))
    source = "def mine(): pass\n\nclass Base: pass\n\ndef double(x):\n    return Base"
    with pytest.raises(UserError, match="defines Base, which a_module has already; give it another name"):
        SymbolReplacements().replace_symbol("a_module:double", source)
    assert dict(vars(module)) == before and module.double(3) == 6
    SymbolReplacements().replace_symbol(
        "a_module:double", source, also_replaced=["Base"]
    )  # it is replaced as well, by another call
    assert module.Base is before["Base"] and module.double(3) is module.Base


def test_a_class_keeps_its_bases(module):
    with pytest.raises(UserError, match="a_module:Child inherits from Base, its replacement from object"):
        SymbolReplacements().replace_symbol("a_module:Child", "class Child:\n    pass")


def test_a_class_and_its_base_can_come_from_one_source(module):
    source = """
class Base:
    def name(self):
        return "new base"


class Child(Base):
    def name(self):
        return "new child of " + super().name()
"""
    child = module.Child()
    for name in ("Base", "Child"):
        SymbolReplacements().replace_symbol(f"a_module:{name}", source, also_replaced=["Base", "Child"])
    assert child.name() == module.Child().name() == "new child of new base" and isinstance(child, module.Base)


def test_a_traceback_shows_the_line_of_the_new_source(module):
    SymbolReplacements().replace_symbol("a_module:double", "def double(x):\n    return x / 0  # here\n")
    with pytest.raises(ZeroDivisionError) as error:
        module.double(1)
    assert "return x / 0  # here" in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "name, source, message",
    [
        ("a_module:double", "def triple(x):\n    return 3 * x", "defines no double"),
        ("a_module:double", "class double: pass", "is a function, the new source defines a class"),
        ("a_module:FACTOR", "FACTOR = 3", "is a int; only functions and classes"),
        ("a_module:missing", "", "has no missing; it has Base, Child, Point, dataclass, double"),
        ("a_module", "", "is not a symbol"),
        ("no_such_module:x", "", "there is no module no_such_module"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(module, name, source, message):
    before, pieces = dict(vars(module)), SymbolReplacements()
    with pytest.raises(UserError, match=message):
        pieces.replace_symbol(name, source)
    assert {k: v for k, v in vars(module).items() if k != "triple"} == before and list(pieces) == []
    assert module.double(1) == 2


def test_source_with_an_error_changes_nothing(module):
    pieces = SymbolReplacements()
    with pytest.raises(SyntaxError):
        pieces.replace_symbol("a_module:double", "def double(x:\n")
    with pytest.raises(NameError):
        pieces.replace_symbol("a_module:double", "def double(x):\n    return 1\nundefined_name")
    assert module.double(1) == 2 and list(pieces) == []


def test_the_source_of_a_piece_of_the_package_is_its_text():
    from minidist.data import partition

    text = read_symbol_source("minidist.data.partition:block_partition")
    assert text.startswith("def block_partition(")
    pieces = SymbolReplacements()
    pieces.replace_symbol("minidist.data.partition:block_partition", text)
    assert partition.block_partition(10, 3, 0).tolist() == [0, 1, 2, 3]
    pieces.restore_symbols()
