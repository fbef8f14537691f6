"""Reading exercise.toml: the keys of every kind of exercise, and messages about wrong tables."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from exercises.catalogue import KINDS, ROOT, Catalogue
from minidist.errors import UserError

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
TABLES = (ROOT / "exercises" / BLOCK.chapter / "exercise.toml").read_text()
TABLE = TABLES[TABLES.index("[block_partition]") : TABLES.index("[random_partition]")]
OF_KIND = {exercise.kind: exercise for exercise in CATALOGUE.values()}  # one of each kind


@pytest.mark.parametrize(
    "old, new, told",
    [
        ('kind = "piece"', 'kind = "pieces"', "kind must be one of piece"),
        ("difficulty = 1", "difficulty = 9", "difficulty must be 1 to 5"),
        ("difficulty = 1", 'difficulty = "1"', "difficulty must be a int, not '1'"),
        ("minutes = 10", "minute = 10", "unknown ['minute'] and missing ['minutes']"),
        ("points = 10", "points = 11", "gives 10 points in all, exercise.toml says 11"),
        ("hints = [", "calls_ = [", "missing ['hints']"),
        ("hints = [", 'hints = ["one"]\nextra = [', "unknown ['extra']"),
        ("say = ", "says = ", "must be a list of tables with the keys first, last, say"),
        ("minidist.data.partition:block_partition", "minidist.data.partition.block_partition", "must be module:symbol"),
        ("[block_partition]", "[other_partition]", "has no tests"),
        ("[block_partition]", "[block_partition", "is not TOML"),
    ],
)
def test_a_wrong_exercise_toml_is_refused(tmp_path, old, new, told):
    folder = tmp_path / "exercises" / BLOCK.chapter
    folder.mkdir(parents=True)
    shutil.copy(BLOCK.test_file, folder)
    assert old in TABLE
    (folder / "exercise.toml").write_text(TABLE.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        [exercise.tests() for exercise in Catalogue(tmp_path).values()]
    assert told in str(error.value)


def one_table(folder, exercise) -> tuple[dict, Path]:
    """The table of an exercise, and the exercise.toml of a course of its own where it may be written."""
    tables = tomllib.loads((exercise.folder / "exercise.toml").read_text())
    mine = folder / "exercises" / exercise.chapter
    shutil.copytree(exercise.folder, mine, ignore=shutil.ignore_patterns("__pycache__"))
    return tables[exercise.name], mine / "exercise.toml"


def write(file, name, table):
    """The table as TOML, in which JSON's texts, numbers and lists of them are good as they are."""
    lines = [f"[{name}]"]
    for key, value in table.items():
        if key in ("blank", "changes"):
            inner = (", ".join(f"{k} = {json.dumps(v)}" for k, v in each.items()) for each in value)
            value = "[" + ", ".join(f"{{ {each} }}" for each in inner) + "]"
        lines.append(f"{key} = {value if key in ('blank', 'changes') else json.dumps(value)}")
    file.write_text("\n".join(lines))


def test_there_is_an_exercise_of_every_kind():
    assert OF_KIND.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_keys_and_no_others(tmp_path, kind):
    exercise = OF_KIND[kind]
    table, file = one_table(tmp_path, exercise)
    write(file, exercise.name, table)
    assert Catalogue(tmp_path)[exercise.name].changes == exercise.changes
    others = {"piece": "m:f", "also": [], "calls": [], "guards": [], "blank": [], "defines": [], "changes": []}
    others.update(fails="x", fault="x")
    for key in table.keys() - {"kind"}:
        write(file, exercise.name, {k: v for k, v in table.items() if k != key})
        if key not in ("also", "imports", "statement"):  # these may be left out
            with pytest.raises(UserError, match=f"missing \\['{key}'(, 'route')?\\]; the keys of a {kind} are"):
                Catalogue(tmp_path)
    for key in others.keys() - table.keys() - {"also"}:
        write(file, exercise.name, {**table, key: others[key]})
        with pytest.raises(UserError, match=f"unknown \\['{key}'\\]"):
            Catalogue(tmp_path)


@pytest.mark.parametrize(
    "kind, change, told",
    [
        ("script", {"fails": "some_test"}, "fails must be one of its tests, not 'some_test'"),
        ("script", {"changes": []}, "leaves the learner nothing to do"),
        ("script", {"changes": [{"first": "a", "last": "b", "say": "c"}]}, "with the keys first, last, put"),
        ("debug", {"fault": ""}, "fault must be the line of the stub"),
        ("script", {"fails": ""}, "fails must be one of its tests, not ''"),
    ],
)
def test_a_wrong_table_of_a_program_is_refused(tmp_path, kind, change, told):
    table, file = one_table(tmp_path, OF_KIND[kind])
    write(file, OF_KIND[kind].name, {**table, **change})
    with pytest.raises(UserError, match=told):
        Catalogue(tmp_path)


@pytest.mark.parametrize("kind", ["script", "debug", "predict"])
def test_a_program_that_is_not_there_is_reported(tmp_path, kind):
    table, file = one_table(tmp_path, OF_KIND[kind])
    write(file, OF_KIND[kind].name, table)
    (file.parent / "programs" / f"{OF_KIND[kind].name}.py").unlink()
    with pytest.raises(UserError, match="has no right text"):
        Catalogue(tmp_path)


def test_an_unknown_exercise_is_reported_with_the_known_ones():
    with pytest.raises(UserError, match="there is no exercise 'blok'; possible: rank_and_world, "):
        CATALOGUE["blok"]
