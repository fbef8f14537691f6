"""Mutants of solutions, and the gate that fails if one survives unexplained."""

import ast
import shutil

import pytest

from exercises import stubs
from exercises.__main__ import main
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.mutants import blank_lines, make_mutants
from exercises.mutate import MutationRun, solution_mutants
from minidist.errors import UserError

PIECES = [name for name, exercise in Catalogue().items() if exercise.kind == "piece"]
FOLDERS = (
    "exercises/ch01_data_distribution",
    "solutions/ch01_data_distribution",
)

# What stands in a blank, and what becomes of it: at least these, by kind.
MUTATIONS_OF_LINE = {
    "handle.wait()": {"drop a wait": {"pass"}, "drop a call": {"handle"}},
    "barrier(group)": {"drop a barrier": {"pass"}},
    "all_reduce(x, group, 'max', async_op=True)": {
        "drop a message": {"pass"},
        "swap arguments": {
            "all_reduce(group, x, 'max', async_op=True)",
            "all_reduce(x, 'max', group, async_op=True)",
        },
        "other reduction": {"all_reduce(x, group, 'min', async_op=True)"},
        "other flag": {"all_reduce(x, group, 'max', async_op=False)"},
        "drop an argument": {"all_reduce(x, group, 'max')", "all_reduce(x, group, async_op=True)"},
    },
    "send(x, rank - 1)": {
        "other direction": {"recv(x, rank - 1)"},
        "other operator": {"send(x, (rank + 1))"},
        "other constant": {"send(x, rank - 0)"},
    },
    "y = x / n": {
        "drop a statement": {"pass"},
        "other operator": {"y = (x * n)"},
        "drop an operand": {"y = x"},
    },
    "y = x * n": {"other operator": {"y = (x / n)"}, "drop an operand": {"y = x", "y = n"}},
    "y = a < b": {"other comparison": {"y = (a <= b)", "y = (a >= b)"}},
    "y = a in b": {"other comparison": {"y = (a not in b)"}},
    "y = a and b": {"and or or": {"y = (a or b)"}, "drop an operand": {"y = a", "y = b"}},
    "y = not a": {"drop a not": {"y = a"}},
    "y = -a": {"drop a sign": {"y = a"}},
    "y = a if b else c": {"always one branch": {"y = a", "y = c"}, "negate a condition": {"y = a if (not b) else c"}},
    "y = [a for a in b if a]": {"negate a condition": {"y = [a for a in b if (not a)]"}},
    "y = min(a, b)": {"min and max and their like": {"y = max(a, b)"}},
    "y = torch.max(a)": {"min and max and their like": {"y = torch.min(a)"}, "drop a call": {"y = a"}},
    "y = x[a:b]": {"off by one": {"y = x[a + 1:b]", "y = x[a:b + 1]"}},
    "y = range(n)": {"off by one": {"y = range(n + 1)"}},
    "y = x[rank]": {"other rank or number": {"y = x[(rank + 1)]"}},
    "y = torch.float64": {"other dtype": {"y = torch.float32"}},
    "y = float(x)": {"other dtype": {"y = int(x)"}},
    "y += x": {"other operator": {"y -= x"}, "drop an operand": {"y = x"}},
    "return x": {"return nothing": {"return None"}},
    "for a in b: pass": {
        "drop a statement": {"pass"},
        "skip an element": {"for a in list(b)[1:]: pass", "for a in list(b)[:-1]: pass"},
        "other order": {"for a in list(b)[::-1]: pass"},
    },
    "for a in b: continue": {"continue and break": {"for a in b: break"}},
    "a = 1\n    b = 2": {"swap statements": {"b = 2 a = 1"}},
    "raise ValueError(f'{rank + 1} is too many')": {},
}


# One rank sees no strides.
WEAK = '''"""Tests that see too little."""

from exercises.testing import expect, index_list, test


@test(points=9)
def one_rank(answer):
    """The only rank has all samples."""
    expect("the samples", index_list(answer.strided_partition(4, 1, 0)), [0, 1, 2, 3])
'''


def program(body):
    return f"def f(a, b):\n    before = 1 + 1\n    {body}\n    after = 1 + 1\n"


@pytest.fixture
def course(tmp_path):
    """A copy of the course for the test to change."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return lambda name="strided_partition": Catalogue(tmp_path)[name]


@pytest.mark.parametrize("body", MUTATIONS_OF_LINE)
def test_mutations_of_a_line(body):
    last = 3 + body.count("\n")
    found: dict[str, set] = {}
    for mutant in make_mutants(program(body), [range(3, last + 1)]):
        assert mutant.text.startswith("def f(a, b):\n    before = 1 + 1\n    ")
        assert mutant.text.endswith("\n    after = 1 + 1\n")
        becomes = " ".join(mutant.text.split("\n    ", 2)[2].rsplit("\n    ", 1)[0].split())
        found.setdefault(mutant.kind, set()).add(becomes)
    for kind, expected in MUTATIONS_OF_LINE[body].items():
        assert expected <= found.get(kind, set()), kind
    assert found or not MUTATIONS_OF_LINE[body]


@pytest.mark.parametrize("name", PIECES)
def test_a_mutant_is_another_program_that_differs_in_a_blank_only(name):
    exercise = Catalogue()[name]
    solution, found = stubs.generate_solution(exercise), solution_mutants(exercise)
    lines, same = solution.splitlines(), ast.dump(ast.parse(solution))
    spaces = blank_lines(stubs.generate_stub(exercise), solution)
    assert len(spaces) == len(exercise.changes) and len(found) >= 5
    assert len({mutant.text for mutant in found}) == len(found)
    for mutant in found:
        assert ast.dump(ast.parse(mutant.text)) != same, mutant
        changed = mutant.text.splitlines()
        space = next(space for space in spaces if mutant.line in space)
        assert changed[: space.start - 1] == lines[: space.start - 1], mutant
        rest = len(lines) - (space.stop - 1)
        assert changed[len(changed) - rest :] == lines[len(lines) - rest :], mutant


def test_the_lines_of_a_blank_are_found():
    text = "'''Stub.'''\na = 1\nraise NotImplementedError('x')\nd = 4\n"
    assert blank_lines(text, "'''Solution.'''\na = 1\nb = 2\nc = 3\nd = 4\n") == [range(3, 5)]


def test_mutants_that_die_are_counted_and_the_gate_is_green(course, tmp_path, capsys):
    exercise = course()
    assert main(["--root", str(tmp_path), "gate", "--mutate", exercise.name]) == 0
    output = capsys.readouterr().out
    total = len(solution_mutants(exercise))
    assert (
        f"strided_partition{' ' * 11}{total:>4} mutants  {total - 1:>4} killed     1 equivalent     0 survived"
        in output
    )
    assert f"all{' ' * 25}{total:>4} mutants" in output and "100.0%" in output


def test_weak_tests_fail_the_mutation_gate(course, tmp_path, capsys):
    exercise = course()
    exercise.test_file.write_text(WEAK)
    assert main(["--root", str(tmp_path), "gate", "--mutate", exercise.name]) == 1
    output = capsys.readouterr().out
    survivor = "return np.arange(rank, n, world_size, dtype=np.int64)  ->  return np.arange(rank, n, dtype=np.int64)"
    assert f"strided_partition: line 33 of the solution, drop an argument: {survivor}\n" in output
    assert "1 survived" in output and output.count("of the solution") == 1


def test_one_unexplained_survivor_is_red_whatever_the_rate(server, course):
    exercise = course()
    head, _, _ = exercise.answers.read_text().partition("[[equivalent]]")
    exercise.answers.write_text(head)
    mutation = MutationRun(server)
    assert mutation.run(exercise).outcomes["survived"] == 1
    assert not mutation.green and len(mutation.problems) == 1
    assert (
        "line 33 of the solution, drop an argument: return np.arange(rank, n, world_size, dtype" in mutation.problems[0]
    )


def test_an_entry_that_is_wrong_is_red(server, course):
    exercise = course()
    with open(exercise.answers, "a") as file:
        line = "return np.arange(rank, n, world_size, dtype=np.int64)"
        for becomes in ("return None", "return rank"):
            file.write(f'\n[[equivalent]]\nwas = "{line}"\nbecomes = "{becomes}"\nwhy = "so it is"\n')
    mutation = MutationRun(server)
    mutation.run(exercise)
    assert not mutation.green
    assert mutation.problems == [
        f"strided_partition: is not equivalent, divides_evenly fails: {line}  ->  return None",
        f"strided_partition: strided_partition.toml lists no mutant as equivalent: {line}  ->  return rank",
    ]


@pytest.mark.parametrize(
    "text, told",
    [
        ("equivalent = ", "is not TOML"),
        ("[[equivalent]]\nwas = 'a'\nbecomes = 'b'\n", "with the keys becomes, was, why"),
        ("[[equivalent]]\nwas = 'a'\nbecomes = 'b'\nwhy = ' '\n", "none empty"),
        ("[[equal]]\nwas = 'a'\nbecomes = 'b'\nwhy = 'c'\n", "has unknown tables"),
    ],
)
def test_a_bad_file_of_equivalents_is_reported(course, text, told):
    exercise = course()
    exercise.answers.write_text(text)
    with pytest.raises(UserError, match=told):
        read_answers(exercise)


def test_mutation_of_nothing_is_red(server, capsys):
    from exercises import mutate

    assert not mutate.run_mutants([], server)
    assert "nothing was mutated" in capsys.readouterr().out
