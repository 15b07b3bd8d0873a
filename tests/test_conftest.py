"""Tests draw the same in any order, and a run that skips more or less than expected fails."""

import random
import shutil

import forked
import numpy as np
import pytest
import seeding
import torch

DRAWING = """
import random
from pathlib import Path
import numpy as np
import pytest
import torch

def note(name):
    drawn = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()
    with Path("drawn").open("a") as file:
        file.write(f"{name} {drawn}\\n")

@pytest.fixture(scope="session")
def shared():
    note("shared")
    note("shared again")

@pytest.fixture
def own():
    note("own")

def test_a(own, shared):
    note("a")

def test_b(request):
    note("b")
    request.getfixturevalue("shared")
    note("b again")
"""


def test_another_order_draws_the_same(root, tmp_path):
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_drawing.py").write_text(DRAWING)
    a, b = "test_drawing.py::test_a", "test_drawing.py::test_b"
    drawn = []
    for order in ([a, b], [b, a]):
        forked.succeed("pytest", *order, cwd=tmp_path)
        drawn.append(sorted((tmp_path / "drawn").read_text().splitlines()))
        (tmp_path / "drawn").unlink()
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 6


def global_draws(*world):
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_ranks_draw_the_same_in_every_call_and_each_its_own(ranks):
    first = ranks(2).call(global_draws)
    assert ranks(2).call(global_draws) == first
    for here, there in zip(*first, strict=True):
        assert here != there


def test_two_commands_draw_differently_and_the_same_when_a_test_is_repeated(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text("import random, numpy, torch\nprint(torch.rand(2), numpy.random.rand(2))")

    def outputs():
        return [forked.succeed(script).stdout for _ in range(2)]

    first = outputs()
    assert first[0] != first[1]
    seeding.seed()
    assert outputs() == first


SKIPPING = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_one(number):
    {}

def test_two():
    pass
"""
SKIPS = "pytest.skip('no such [machine]')"
GONE = "test_it.py::test_two: gone"
LINE = "test_it.py::test_one: no such [machine]"
MODULE = "import pytest\npytest.importorskip('nowhere', reason='no nowhere')"


@pytest.mark.parametrize(
    ("source", "lines", "fault", "workers"),
    [
        (SKIPPING.format(SKIPS), f"# why\n{LINE}", None, 0),
        (SKIPPING.format(SKIPS), "test_it.py::*: no such *", None, 0),
        (SKIPPING.format(SKIPS), "test_it.py::test_one: no other", LINE, 0),
        (SKIPPING.format(SKIPS), f"{LINE}\n{GONE}", GONE, 0),
        (SKIPPING.format("pass"), LINE, LINE, 1),
        (SKIPPING.format("pass"), f"may {LINE}", None, 0),
        (SKIPPING.format("pytest.xfail('known')"), "", None, 0),
        (MODULE, "test_it.py: no nowhere", None, 0),
        (MODULE, "", "test_it.py: no nowhere", 1),
    ],
)
def test_only_expected_skips_pass(source, lines, fault, workers, tmp_path):
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    (tmp_path / "expected").write_text(lines)
    words = ("-p", "expected_skips", "--expected-skips=expected", f"-n{workers}")
    done = forked.run("pytest", *words, cwd=tmp_path)
    assert done.returncode == (fault is not None), done.stdout
    assert ("skips that differ from expected" in done.stdout) is (fault is not None)
    if fault is not None:
        assert f"\n    {fault}\n" in done.stdout
