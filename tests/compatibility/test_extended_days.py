"""Days of earlier versions, written by `make_day_fixtures`, are read and extended as they were."""

import pytest
from archives import DAYS, unpack
from make_day_fixtures import extend

from dlrm.data.transform.transform import Transform
from dlrm.preproc.increments.inspection import inspect_chain


@pytest.fixture(scope="module", params=DAYS, ids=lambda path: path.name.split(".tar")[0])
def days(request, tmp_path_factory):
    """Returns the files of an earlier version."""
    return unpack(request.param, tmp_path_factory.mktemp("days"))


def test_there_are_days():
    assert DAYS


def test_days_have_their_values(days):
    for day in ("1", "2"):
        fitted = Transform.load(days.folder / day / "transform")
        fitted.check_all()
        found = [dictionary.values() for dictionary in fitted.dictionaries]
        assert found == days.expected["values"][day]
    assert any(len(dictionary.segments) > 1 for dictionary in fitted.dictionaries[:1])
    assert not inspect_chain(days.folder / "2")["faults"]


def test_the_next_day_has_its_values(days, tmp_path):
    assert extend(days.folder, 3, tmp_path / "3") == days.expected["values"]["3"]
