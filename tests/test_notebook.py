"""The notebook of the tutorial has its blocks as cells, and runs."""

import json
import os
import sys

import pytest


@pytest.fixture
def notebook(root):
    return json.loads((root / "docs" / "tutorial.ipynb").read_text())


def test_the_cells_are_the_blocks_of_the_page_in_order(root, notebook):
    page = (root / "docs" / "tutorial.md").read_text()
    codes = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    places = [page.index(code.replace("!", "") if code[0] == "!" else code) for code in codes]
    assert len(codes) > 10
    assert places == sorted(places)
    assert sum(code.startswith("!dlrm") or "\n!dlrm" in code for code in codes) == 2
    texts = "".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    assert "pip install" in texts  # a block that is not run is shown as text
    assert not any(cell.get("outputs") for cell in notebook["cells"])


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(root, notebook, tmp_path, monkeypatch):
    why = "pip install -e '.[docs]' has it"
    nbformat = pytest.importorskip("nbformat", reason=why)
    client = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    command = tmp_path / "dlrm"  # as an installation has it
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dlrm "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
    opened = nbformat.reads(json.dumps(notebook), as_version=4)
    nbformat.validate(opened)
    where = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(opened, timeout=300, resources=where).execute()
    assert (tmp_path / "pairs.png").exists()
    assert (tmp_path / "page" / "evaluation.html").exists()
    assert (tmp_path / "scores.npy").exists()
