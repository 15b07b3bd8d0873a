"""Writes a dataset in slices of objects, as a cluster publishes it, for later versions to read.

    python tests/compatibility/make_slice_fixtures.py OUTPUT

OUTPUT and OUTPUT.tar.xz are as `make_fixtures` says. `objects` has the objects below the dataset's
URI by their keys, and `expected.json` the sum of each file of the dataset.
"""

import json
import os
import sys
import tarfile
from pathlib import Path

from make_fixtures import ROOT, call

sys.path.insert(0, str(ROOT / "benchmarks"))
from s3_server import Endpoint  # noqa: E402

from dlrm.remote.publish import find_published  # noqa: E402
from dlrm.remote.store import open_store  # noqa: E402
from dlrm.remote.uri import Uri  # noqa: E402

ROWS, OUTPUT = 900, "s3://bucket/dataset"


def main(output: Path) -> None:
    """Writes the files and packs them."""
    output.mkdir()
    with Endpoint(output.parent / f"{output.name}.store") as endpoint:
        os.environ.update(endpoint.environment)
        endpoint.make("bucket")
        lines = (f"{i % 2},{i / ROWS},w{i * i % 31},{i % 5}|{i % 3}" for i in range(ROWS))
        store = open_store(Uri.parse(OUTPUT))
        store.write("rows.csv", "\n".join(["label,number,word,list", *lines, ""]).encode())
        fields = "categorical: [word, {column: list, separator: '|', max_length: 2, type: integer}]"
        store.write("schema.yaml", f"label: label\nnumerical: [number]\n{fields}\n".encode())
        where = ["--schema=s3://bucket/schema.yaml", "--input=s3://bucket/rows.csv"]
        call("dlrm", "prepare", *where, f"--output={OUTPUT}", "--through_store", "--no-report")
        found = find_published(Uri.parse(OUTPUT))
        assert found is not None
        for entry in store.entries(found.uri.folder):
            path = output / "objects" / entry.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(entry))
    sums = {name: file["crc32"] for name, file in found.manifest["files"].items()}
    (output / "expected.json").write_text(json.dumps({"sums": sums}, indent=2) + "\n")
    with tarfile.open(f"{output}.tar.xz", "w:xz") as tar:
        for path in sorted(output.iterdir()):
            tar.add(path, path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
