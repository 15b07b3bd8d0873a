"""Files with checksums and roles, written by `make_sealed_fixtures`, are read as they were."""

import json

import forked
import numpy as np
import pytest
from archives import SCORES, SEALED, unpack
from make_sealed_fixtures import SHAPE, TUNE, rows

import dlrm
from dlrm.distributed.placement import read_placement
from dlrm.serving.server.reader import check_version
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.reports.roles import Roles

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=SEALED, ids=lambda path: path.name.split(".tar")[0])
def sealed(request, tmp_path_factory):
    """Returns the files of an earlier version."""
    return unpack(request.param, tmp_path_factory.mktemp("sealed"))


def flipped(path):
    """Changes a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_there_are_sealed_files():
    assert SEALED


def test_a_model_has_its_scores_and_the_roles_of_its_rows(sealed):
    model = dlrm.load(sealed.folder / "model")
    found = model.predict(rows().drop(columns="clicked"))
    np.testing.assert_allclose(found, sealed.expected["scores"], **SCORES)
    assert Roles.from_config(read_config(model.path)) == Roles(chooses="set_aside", reports="test")


def test_an_exported_version_is_compared_with_its_manifest(sealed):
    version = sealed.folder / "models/model/1"
    assert sorted(path.name for path in version.iterdir()) == sealed.expected["version"]
    check_version(version)
    flipped(version / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt.*CRC-32"):
        check_version(version)


def test_a_search_goes_on_with_its_results(sealed, monkeypatch):
    monkeypatch.chdir(sealed.folder)
    results = {path: path.read_bytes() for path in (sealed.folder / "search/results").iterdir()}
    assert results
    done = forked.run("dlrm.scripts.tune", *TUNE, "--rungs=1")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in results} == results
    facts = json.loads((sealed.folder / "search/tuning.json").read_text())
    assert facts["trials"] == sealed.expected["best"]


def test_a_placement_and_its_checksum_are_read(sealed):
    path = sealed.folder / "plan.yaml"
    assert read_placement(path, *SHAPE.values()).tables_by_rank() == [[0], [1]]
    flipped(path)
    with pytest.raises(ValueError, match="CRC-32"):
        read_placement(path, *SHAPE.values())
