"""The programs of the page on LightGBM run, and its table counts their lines."""

import re

import pytest
from test_documented_commands import ROOT, TUTORIAL, blocks

PAGE = ROOT / "docs" / "guide" / "from-lightgbm.md"
OF_LIGHTGBM = "where LightGBM is installed"


def programs():
    """Returns the imports, and the programs of both libraries in order."""
    first, *others = [block for block in blocks(PAGE) if block.language == "python"]
    ours = [one.text for one in others if OF_LIGHTGBM not in one.note]
    theirs = [one.text for one in others if OF_LIGHTGBM in one.note]
    assert len(ours) == len(theirs) == 9
    return first.text, ours, theirs


@pytest.fixture
def names(monkeypatch, tmp_path):
    """Returns what the programs assume: the log and the schema of the tutorial, and imports."""
    monkeypatch.chdir(tmp_path)
    found = {}
    texts = [one.text for one in blocks(TUTORIAL) if one.language == "python" and one.is_run]
    for text in (*texts[:2], programs()[0]):
        exec(text, found)
    found["log"] = found["log"].drop(columns="seconds_on_page")
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
def test_our_programs_run_and_the_model_is_good(names, capsys):
    for text in programs()[1]:
        exec(text, names)
    assert names["model"].results["test_auc"] > 0.77
    assert "500, 500" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
def test_the_programs_for_lightgbm_run(names, capsys):
    names["lightgbm"] = pytest.importorskip("lightgbm", reason="no lightgbm (extra peers)")
    for text in programs()[2]:
        exec(text, names)
    assert float(capsys.readouterr().out.split()[0]) > 0.72  # AUC of the first job


def test_the_table_counts_the_lines_of_the_programs():
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.M)
    _, ours, theirs = programs()
    counted = [tuple(str(lines(text)) for text in pair) for pair in zip(ours, theirs, strict=True)]
    assert rows == counted


def lines(text):
    """Returns the number of lines of code, without imports."""
    code = [line for line in text.splitlines() if line.strip()]
    return sum(not line.startswith(("from ", "import ", "#")) for line in code)
