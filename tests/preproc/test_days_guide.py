"""The commands of the guide page on days run."""

import pytest
from tables_testing import write_table
from test_days import TEXTS, small
from test_documented_commands import ROOT, blocks, run, statements

from dlrm.data.schema.schema import Schema
from dlrm.data.transform.transform import Transform

PAGE = ROOT / "docs" / "guide" / "days.md"


@pytest.mark.slow
def test_commands_of_the_page_run(tmp_path):
    Schema.from_dict(TEXTS).save(tmp_path / "schema.yaml")
    for day in (1, 2, 3):
        write_table(small(day), tmp_path / f"day{day}.parquet", 20)
    (text,) = (
        block.text for block in blocks(PAGE) if block.note.startswith("run by tests/preproc")
    )
    lines = list(statements(text))
    assert len(lines) == 3
    for line in lines:
        run(line, tmp_path)
    sizes = [Transform.load(tmp_path / f"day{day}/transform").cardinalities for day in (1, 2, 3)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]
