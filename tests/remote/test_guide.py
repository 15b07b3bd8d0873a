"""The commands of the guide page on data elsewhere run against servers of this machine."""

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_documented_commands import ROOT, blocks, run, statements

from dlrm.remote.objects import open_store
from dlrm.remote.uri import Uri

PAGE = ROOT / "docs" / "guide" / "elsewhere.md"
pytestmark = pytest.mark.slow


def commands(scheme):
    """Returns the commands of the page's blocks that this test runs, with URIs of a scheme."""
    own = [block.text for block in blocks(PAGE) if block.note.startswith("run by tests/remote")]
    lines = [line for text in own for line in statements(text)]
    return [line for line in lines if line.startswith("dlrm ") and f"{scheme}://" in line]


def write_rows(store):
    count = range(900)
    rows = {
        "bought": [i % 2 for i in count],
        "price": [i % 17 + i % 2 * 0.5 for i in count],
        "shop": [f"shop {i % 9}" for i in count],
    }
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(rows), sink)
    store.write("sales/part-0.parquet", sink.getvalue().to_pybytes())
    store.write("sales.yaml", b"label: bought\nnumerical: [price]\ncategorical: [shop]\n")


def run_all(scheme, bucket, folder):
    found = commands(scheme)
    for line in found:
        run(line.replace(f"{scheme}://bucket", f"{scheme}://{bucket}"), folder)
    return found


def test_commands_by_s3_run(bucket, tmp_path):
    write_rows(open_store(bucket))
    assert len(run_all("s3", bucket.authority, tmp_path)) == 5


def test_commands_by_google_storage_run(endpoint, store_uri, tmp_path, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.url)
    write_rows(open_store(Uri("gs", store_uri.authority)))
    assert len(run_all("gs", store_uri.authority, tmp_path)) == 1
