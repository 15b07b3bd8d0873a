"""Writes files with checksums and roles, for later versions to read in the same way.

    python tests/compatibility/make_sealed_fixtures.py OUTPUT

OUTPUT and OUTPUT.tar.xz are as `make_fixtures` says. `data` is a dataset, `model` a model of
`dlrm.fit` on it with rows set aside, `models` its export, `search` the output of `tune`, and
`plan.yaml` a placement. `expected.json` has the model's scores and the
trials of the search.
"""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
from make_fixtures import ROOT, call

import dlrm
from dlrm.distributed.placement import Piece, Placement, placement_text

ROWS = 600
SHAPE = {"rows": [10, 3], "dim": 8, "ranks": 2}
TUNE = ("--dataset=data", "--space=space.yaml", "--output=search", "--processes=1", "--trials=2")


def rows() -> pd.DataFrame:
    """Returns rows of which the label depends on both fields."""
    draw = np.random.default_rng(0)
    item, price = draw.integers(0, 9, ROWS), draw.random(ROWS).round(3)
    clicked = (draw.random(ROWS) < 0.2 + 0.05 * item + 0.1 * price).astype(int)
    return pd.DataFrame({"clicked": clicked, "item": [f"i{one}" for one in item], "price": price})


def main(output: Path) -> None:
    """Writes the files and packs them."""
    output.mkdir()
    os.chdir(output)
    table = rows()
    table.to_csv("rows.csv", index=False)
    call("-m", "dlrm.scripts.schema", "--input=rows.csv", "--label=clicked", "--output=schema.yaml")
    call("-m", "dlrm.scripts.prepare", "--schema=schema.yaml", "--input=rows.csv", "--output=data")
    model = dlrm.fit(
        "data",
        embedding_dim=4,
        bottom_mlp_sizes=[4],
        top_mlp_sizes=[4, 1],
        epochs=1,
        base_device="cpu",
    )
    model.save("model")
    call(ROOT / "triton/export.py", "--checkpoint=model", "--save-dir=models", "--ts-trace")
    version = Path("models/model/1")
    shutil.rmtree("models/model_transform")  # its code reads what the same version wrote
    Path("space.yaml").write_text("lr: [0.01, 0.02]\nembedding_dim: 2\ntop_mlp_sizes: [[4, 1]]\n")
    call("-m", "dlrm.scripts.tune", *TUNE, "--rungs=1")
    pieces = (Piece(0, (0, 10), (0, 8), 0, (10, 8)), Piece(1, (0, 3), (0, 8), 1, (3, 8)))
    ranks = Placement(SHAPE["rows"], SHAPE["dim"], SHAPE["ranks"], pieces)
    Path("plan.yaml").write_text(placement_text(ranks, ["item", "user"]))
    expected = {
        "scores": model.predict(table.drop(columns="clicked")).tolist(),
        "version": sorted(path.name for path in version.iterdir()),
        "best": json.loads(Path("search/tuning.json").read_text())["trials"],
    }
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    os.chdir(output.parent)
    with tarfile.open(f"{output}.tar.xz", "w:xz") as tar:
        for path in sorted(output.iterdir()):
            tar.add(path, path.name)
    shutil.rmtree(output)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())
