"""Times the server on raw rows before it scores them, from a request's bytes to a model's inputs.

    python benchmarks/raw_rows.py [--rounds 15] [--dictionary 5000]

Rows have 13 integers and 26 hashes, like Criteo's. The sides are processes that take turns, one
with the compiled library and one with NumPy alone, as on a server that cannot load the library.
Medians over rounds are printed; "copy" is the time to copy the request's bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dlrm.data.sources import native
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.serving.server.names import FACTS, KIND, RAW
from dlrm.serving.server.reader import Reader

NUM_NUMERICAL, NUM_CATEGORICAL, BATCH = 13, 26, 4096


def write_model(directory: Path, values: int) -> None:
    """Writes what a reader needs of a served model."""
    random = np.random.default_rng(0)
    dictionaries = [
        np.unique(random.integers(0, 2**32, values, np.uint32)) for _ in range(NUM_CATEGORICAL)
    ]
    transform = Transform.from_logs(NUM_NUMERICAL, dictionaries, frequency_limit="1")
    transform.save(directory / "transform")
    facts = {
        "num_numerical": NUM_NUMERICAL,
        "table_sizes": transform.cardinalities,
        "hashed": False,
        "categorical_names": [f"categorical {i}" for i in range(NUM_CATEGORICAL)],
        "numerical_dtype": "float32",
        "ids_dtype": "int64",
        "output_kind": "logit",
    }
    (directory / FACTS).write_text(json.dumps(facts))
    write_manifest(directory, KIND)


def request(directory: Path, rows: int) -> np.ndarray:
    """Returns raw rows as a request has them, uint8 `[rows, width]`."""
    transform, random = Transform.load(directory / "transform"), np.random.default_rng(1)
    lines = []
    for _ in range(rows):
        fields = [str(number) for number in random.integers(0, 10_000, NUM_NUMERICAL)]
        fields += [f"{random.choice(known.keys):08x}" for known in transform.dictionaries]
        lines.append("\t".join(fields).encode())
    array = np.array(lines)
    return array.view(np.uint8).reshape(rows, -1)


def side(directory: Path, with_library: bool) -> None:
    """Prints the milliseconds that one row and a batch take, and the batch's copy."""
    if not with_library:
        native.host = native.served = None
    reader = Reader(directory, BATCH)
    found = {}
    for rows, times in ((1, 300), (BATCH, 7)):
        tensor = request(directory, rows)
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            (inputs,) = reader.read([{RAW: tensor}])
            seconds.append(time.perf_counter() - began)
        if isinstance(inputs, ValueError):
            raise inputs
        found[f"{rows} rows"] = 1e3 * statistics.median(seconds)
    began = time.perf_counter()
    tensor.copy()
    found["copy"] = 1e3 * (time.perf_counter() - began)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dictionary", type=int, default=5000, help="values of each column")
    parser.add_argument("--side", choices=["library", "numpy"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options.model, options.side == "library")
        return
    found: dict[str, dict[str, list[float]]] = {"library": {}, "numpy": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.dictionary)
        for _ in range(options.rounds):
            for name, values in found.items():
                command = [sys.executable, __file__, "--side", name, "--model", folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                for what, value in json.loads(done.stdout).items():
                    values.setdefault(what, []).append(value)
    print(f"{NUM_NUMERICAL} + {NUM_CATEGORICAL} fields, {options.rounds} rounds, milliseconds\n")
    print(f"| side | 1 row | {BATCH} rows | copy of these |\n|---|---|---|---|")
    for name, values in found.items():
        medians = [statistics.median(numbers) for numbers in values.values()]
        print(f"| {name} | {medians[0]:.3f} | {medians[1]:.2f} | {medians[2]:.2f} |")


if __name__ == "__main__":
    main()
