"""Writes tables, and what this version makes of them, for later versions to read in the same way.

    python tests/compatibility/make_table_fixtures.py OUTPUT

OUTPUT and OUTPUT.tar.xz are as `make_fixtures` says. `tables/` holds the same rows as CSV with and
without a header, TSV, JSON lines and Parquet, and schemas; each of `DATASETS` was prepared from one
of the files, and `RUNS` trained on the datasets. The columns hold values whose text is not
canonical ("True", "12.0", "12.50", times in several forms), and the files use the parts of CSV in
which parsers differ: see `csv_line` and `write_tsv`.
"""

import datetime
import json
import shutil
import sys
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from make_fixtures import ROOT, build, call, expect_rows, expect_run
from observations import answers, measures_of_files, scores_in_memory, scores_of_files

import dlrm
from dlrm.preproc.stages.division import SplitConfig
from dlrm.train.checkpoints.directory import best_checkpoint

ROWS = 300
TEXTS = 20  # first rows, scored as values of Python, too
TABLES = "tables"
SCHEMA = """\
version: 1
label: {column: clicked, positive: "yes"}
missing_values: [NA, "?", "-999"]
numerical:
  - age
  - {column: amount, transform: log, bins: 4}
categorical:
  - {column: member, encodings: [count]}
  - active
  - {column: store, frequency_limit: 2, encodings: [{kind: target, smoothing: 5}]}
  - zip
  - slot
  - tariff
  - country
  - {column: user, type: integer, frequency_limit: 6, hash_buckets: 5}
  - {column: tags, max_length: 3, separator: ;, pooling: mean}
  - comment
crosses:
  - {fields: [store, member], buckets: 10}
  - {fields: [country, active], name: place, frequency_limit: 2, buckets: 2}
weight: importance
groups: [user]
time: {column: at, zone: UTC}
"""
# Booleans as labels, the country NA, two fields with one dictionary.
TYPED_SCHEMA = """\
label: bought
missing_values: ["?", -999]
numerical:
  - {column: age, transform: quantile, bins: 4}
  - {column: amount, transform: none}
categorical:
  - member
  - {column: active, dictionary: flags}
  - {column: gift, dictionary: flags}
  - {column: store, encodings: [count, target]}
  - {column: zip, max_ids: 3, hash_buckets: 2}
  - slot
  - {column: tariff, frequency_limit: 3}
  - country
  - {column: user, type: integer, frequency_limit: 6}
  - {column: tags, max_length: 2, separator: ;, keep: first, ordered: false}
crosses:
  - {fields: [zip, tariff], frequency_limit: 3}
groups: [store, user]
time: {column: at, zone: UTC}
"""


class Prepared(NamedTuple):
    """Holds what a dataset was made of: the files of its schema and rows, and their division."""

    schema: str
    table: str
    division: SplitConfig


PREPARED = {
    "table_csv": Prepared("schema.yaml", "rows.csv", SplitConfig(0.3)),
    "table_tsv": Prepared("schema.yaml", "rows.tsv", SplitConfig(0.3, 0.1)),
    "table_jsonl": Prepared("typed.yaml", "rows.jsonl", SplitConfig(0.3, keep_negatives=0.8)),
    "table_parquet": Prepared("typed.yaml", "rows.parquet", SplitConfig(test_from="2026-11-10")),
    "table_drafted": Prepared("drafted.yaml", "rows.csv", SplitConfig(0.3)),
}
DATASETS: dict[str, tuple[str, dict[str, Any]]] = {name: ("clicks", {}) for name in PREPARED}
# Numbers, and values that have one text in any version: the same rows and ids again.
KEPT = {
    "schema.yaml": ("age", "amount", "zip", "country", "user", "comment"),
    "typed.yaml": ("age", "amount", "zip", "country", "user"),
    "drafted.yaml": ("age", "amount", "zip", "country", "comment"),
}
_DLRM = [
    *("--base_device=cpu", "--embedding_dim=2", "--bottom_mlp_sizes=4,2", "--top_mlp_sizes=4,1"),
    *("--batch_size=32", "--test_batch_size=100", "--print_freq=100", "--test_freq=2"),
    *("--warmup_steps=1", "--decay_start_step=20", "--decay_steps=20", "--keep_checkpoints=1"),
]
_ADAM = ["--embedding_optimizer=adam", "--mlp_optimizer=adam", "--lr=0.1"]
RUNS: dict[str, tuple[str, int, int, list[str]]] = {
    name: ("main", 1, 4, [f"--dataset={{}}/{name}", *_DLRM, *(_ADAM * adam or ["--lr=4"])])
    for name, adam in zip(PREPARED, (True, False, False, False, False), strict=True)
}
EXPORTED = "table_csv"


def main(output: Path) -> None:
    build(output, make)


def make() -> dict[str, Any]:
    """Writes all files in the current folder; returns what is expected of them."""
    make_tables()
    for name, one in PREPARED.items():
        chosen = {k: v for k, v in asdict(one.division).items() if v}
        words = [f"--{flag}={value}" for flag, value in chosen.items()]
        words += [f"--schema={TABLES}/{one.schema}", f"--input={TABLES}/{one.table}"]
        call("-m", "dlrm.scripts.prepare", *words, f"--output={name}", "--cores=1", "--noreport")
    expected = {"rows": expect_rows(DATASETS)}
    expected["runs"] = {name: expect_run(name, run) for name, run in RUNS.items()}
    expected["tables"] = expect_tables()
    expect_export()
    return expected


def make_tables() -> None:
    """Writes the files of the rows, and the schemas."""
    folder = Path(TABLES)
    folder.mkdir()
    rows = draw()
    lines = [csv_line(index, row) for index, row in enumerate(rows)]
    (folder / "headless.csv").write_bytes("".join(lines).encode())
    (folder / "rows.csv").write_bytes(("\ufeff" + ", ".join(rows[0]) + "\n\n").encode())
    with open(folder / "rows.csv", "ab") as file:
        file.write("".join(lines).encode())
    write_tsv(folder / "rows.tsv", rows)
    typed = [typed_row(row) for row in rows]
    (folder / "rows.jsonl").write_text("".join(map(json_line, rows, typed)), encoding="utf-8")
    write_parquet(folder / "rows.parquet", typed)
    texts = [{name: text or None for name, text in row.items()} for row in rows[:TEXTS]]
    json_rows = [json.loads(json_line(*pair)) for pair in zip(rows[:TEXTS], typed, strict=False)]
    Path("expected/dicts.json").write_text(json.dumps(texts + json_rows) + "\n")
    columns = {name: [row[name] for row in texts] for name in texts[0]}
    Path("expected/columns.json").write_text(json.dumps(columns) + "\n")
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "typed.yaml").write_text(TYPED_SCHEMA)
    words = [f"--input={TABLES}/rows.csv", "--label=clicked", "--weight=importance", "--time=at"]
    words += ["--encode=count:member", "--cross=zip,active:20"]
    call("-m", "dlrm.scripts.schema", *words, f"--output={folder / 'drafted.yaml'}")


COMMENTS = ("plain", "a, b", 'say "hi"', "two\nlines", '5" pipe', "", "São Paulo", "plain")


def draw() -> list[dict[str, str]]:
    """Draws rows, each as the texts of its cells."""
    random = np.random.default_rng(5)

    def some(*values: str) -> str:
        return str(random.choice(np.array(values)))

    rows = []
    for index in range(ROWS):
        member, store, age = some("True", "False"), some("12.0", "12", "7", "7.0"), 18 + index % 50
        odds = 1 / (1 + np.exp((45 - age) / 8 - 2 * (member == "True") + 2 * (store[0] == "7")))
        amount = f"{random.integers(0, 800) / 8:.2f}"
        time = datetime.datetime(2026, 11, 1) + datetime.timedelta(minutes=60 * index)
        rows.append(
            {
                "clicked": "yes" if random.random() < odds else "no",
                "bought": some("True", "False") if random.random() < 0.2 else member,
                "age": some("-999", "", f"{age}.0") if index % 9 == 0 else str(age),
                "amount": some("?", "") if index % 11 == 0 else amount,
                "member": "" if index % 23 == 0 else member,
                "active": some("true", "false"),
                "gift": some("true", "True", "False"),
                "store": store,
                "zip": some("00501", "501", "08001", "90210", ""),
                "slot": some(*_SLOTS),
                "tariff": some("12.50", "12.5", "9.00", "9", "0.10"),
                "country": some("NA", "DE", "US", "?", "DE", ""),
                "user": str(int(9 * random.random() ** 2)) + some("", "", ".0"),
                "tags": ";".join(some("red", "True", "7.0", "7", "NA") for _ in range(index % 4)),
                "importance": some("1", "0.5", "2.0"),
                "at": some(str(time), f"{time.isoformat()}Z", f"{time.isoformat()}+00:00"),
                "comment": some(*COMMENTS),
            }
        )
    return rows


_SLOTS = ("2026-11-01", "2026-11-01T00:00:00", "2026-11-01 08:30:00", "2026-11-01T08:30:00Z")


def csv_line(index: int, row: dict[str, str]) -> str:
    """Returns a row as CSV.

    Quotes surround cells that need them, and others of some rows, also after a blank; a quote
    within a cell without them stands for itself. Some rows have blanks after commas, a blank line
    after them, or end in CR LF.
    """
    always = index % 7 == 0
    cells = []
    for text in row.values():
        needed = any(character in text for character in ',\n"') and text != '5" pipe'
        doubled = text.replace('"', '""')
        cells.append(f'"{doubled}"' if needed or always else text)
    ends = "\r\n" if index % 10 == 0 else "\n"
    return (", " if index % 3 == 0 else ",").join(cells) + ends * (1 + (index % 13 == 0))


def write_tsv(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes rows with CR LF.

    A comment of row 40 begins with a quote, and one of row 42 ends with one, so that the rows from
    40 to 42 are one. Comments of two lines are quoted.
    """
    lines = ["\t".join(rows[0])]
    for index, row in enumerate(rows):
        comment = f'"{row["comment"]}"' if "\n" in row["comment"] else row["comment"]
        comment = {40: '"begins', 42: 'ends"'}.get(index, comment if index != 41 else "between")
        lines.append("\t".join([*row.values()][:-1] + [comment]))
    path.write_bytes("".join(f"{line}\r\n" for line in lines).encode())


def typed_row(row: dict[str, str]) -> dict[str, Any]:
    """Returns a row with values of Python's types; missing numbers are null or -999."""

    def number(text: str) -> float | None:
        return None if text in ("", "?") else float(text)

    def flag(text: str) -> bool | None:
        return None if not text else text.lower() == "true"

    return {
        **row,
        **{name: flag(row[name]) for name in ("bought", "member", "active", "gift")},
        **{name: number(row[name]) for name in ("age", "amount", "store", "importance")},
        "zip": row["zip"] or None,
        "slot": _moment(row["slot"]),
        "tariff": Decimal(row["tariff"]),
        "user": int(float(row["user"])),
        "tags": row["tags"].split(";") if row["tags"] else [],
        "at": _moment(row["at"]),
    }


def _moment(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    return time.replace(tzinfo=datetime.timezone.utc)


def json_line(row: dict[str, str], typed: dict[str, Any]) -> str:
    """Returns a row as JSON, whose numbers have the texts of the cells: 12.0, 12 and 12.50."""
    entries = []
    for name, value in typed.items():
        if value is not None and not isinstance(value, str | bool | list | datetime.datetime):
            text = row[name]
        else:
            text = json.dumps(row[name] if isinstance(value, datetime.datetime) else value)
        entries.append(f"{json.dumps(name)}: {text}")
    return "{" + ", ".join(entries) + "}\n"


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"slot": pa.timestamp("s"), "at": pa.timestamp("us", "UTC"), "user": pa.int32()}
    kinds |= {"tariff": pa.decimal128(5, 2), "tags": pa.list_(pa.string())}
    arrays = {
        name: pa.array([row[name] for row in rows], kinds.get(name, None)) for name in rows[0]
    }
    pq.write_table(pa.table(arrays), path)


def scored_by(run: str) -> list[str]:
    """Returns the files that a run's model scores.

    A model without lists scores no lists, and only one of CSV knows the columns of `headless.csv`.
    """
    files = ["rows.csv", "rows.tsv"]
    files += ["headless.csv"] * PREPARED[run].table.endswith("sv")
    return files + ["rows.jsonl", "rows.parquet"] * (run != "table_drafted")


def expect_tables() -> dict[str, Any]:
    """Stores the scores of the rows in all forms; returns run -> its files and measures."""
    files = {run: scored_by(run) for run in RUNS}
    scores = scores_of_files(call, Path(), files)
    for run in RUNS:
        found = scores[run] | scores_in_memory(Path(), run)
        np.savez(f"expected/tables-{run}.npz", **found)
    own = {run: one.table for run, one in PREPARED.items()}
    measured = measures_of_files(call, Path(), own)
    return {run: {"files": files[run], "measures": measured[run]} for run in RUNS}


def expect_export() -> None:
    """Exports the best checkpoint of `EXPORTED`; stores its responses.

    Stack traces of the nodes, which name this repository's folder, are removed. The code that an
    export carries for its server is left out: it reads what the same version wrote. Later versions
    of the package read the other files.
    """
    checkpoint = best_checkpoint(Path("runs", EXPORTED))
    assert checkpoint is not None
    words = [f"--checkpoint={checkpoint}", "--save-dir=models", f"--dataset={EXPORTED}"]
    call(ROOT / "triton/export.py", *words, "--python")
    names = dlrm.load(checkpoint).row_transform.names
    rows = json.loads(Path("expected/dicts.json").read_text())[:TEXTS]
    lines = ["\t".join(row[name] or "" for name in names).replace("\n", " ") for row in rows]
    Path("expected/lines.tsv").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    version = Path("models/model/1")
    remove_traces(version / "model.onnx" / "model.onnx")
    np.savez("expected/answers.npz", **answers(version, Path(), EXPORTED))
    shutil.rmtree(version / "dlrm")
    (version / "model.py").unlink()


def remove_traces(path: Path) -> None:
    """Removes the metadata of an ONNX model's nodes."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        del node.metadata_props[:]
    path.write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())
