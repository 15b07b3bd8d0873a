"""Compares models on real rows: ours, boosted trees, other networks, logistic regression.

    python benchmarks/quality.py --adult adult.data --bank bank-full.csv --simulated 700000
    python benchmarks/quality.py --raw train.parquet --test test.parquet --schema schema.yaml
    python benchmarks/quality.py --raw day_0,day_1 --test day_2 --schema criteo

`recipe` is `--recipe auto`; `packed`, `quadratic`, `mixed` are the same with `--ensemble 5`, with
`--interaction_op quadratic --self_ensemble` and with `--ensemble dot*3,quadratic*2`. `as_it_was`
has the defaults of `dlrm.fit`. These are not tuned, nor are RealMLP and TabM, which have the tuned
defaults of pytabkit.

Every other contender gets the same number of trials (--trials), drawn from the space that the
results state; its defaults are the first trial. A trial is fitted to four fifths of the training
rows and judged by the AUC of the others, which are random, or with --raw and --simulated the last
ones. Boosting stops early on them. The test rows are scored once, by the best trial fitted to all
training rows, with --members seeds. Adult and Bank are divided into --folds, each of which is
tested in turn; the differences to --against are paired over folds, or over seeds if there is one
test. Each contender runs in a process of its own. --output keeps results; the same command resumes
the run. Times are those of the processor, of all threads. The others' packages are in the extra
"peers", and what is not installed is left out.
"""

import argparse
import csv
import importlib.util
import io
import itertools
import json
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import numpy as np
import optuna
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch
from quality_contenders import CONTENDERS, NEEDS, Rows, labels_of

from dlrm.api.training import SETTINGS
from dlrm.command_line import aligned, fail
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_files import open_bytes
from dlrm.data.workers import process_pool
from dlrm.documents import read_json, read_yaml
from dlrm.files import write_atomically
from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.table import METRICS, SHOWN, cost
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.scripts.tune import Space, check_space, fixed, suggest

HELD_OUT = 0.2  # of the training rows, by which tuning judges
_ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status"),
    *("occupation", "relationship", "race", "sex", "capital_gain", "capital_loss"),
    *("hours_per_week", "native_country", "income"),
)
_ADULT_NUMBERS = [_ADULT[place] for place in (0, 2, 4, 10, 11, 12)]
_BANK_NUMBERS = ["day", "campaign", "duration", "pdays", "previous", "age", "balance"]
_CRITEO = ["label", *(f"i{n}" for n in range(13)), *(f"c{n}" for n in range(26))]


class Data(NamedTuple):
    """Rows to contend on.

    Attributes:
        name: of the rows.
        schema: what their columns mean.
        splits: training and test rows of each fold.
        in_order: whether rows are in the order of time, so that tuning judges by the last ones.
        best_auc: what no model can exceed; None where nobody knows.
    """

    name: str
    schema: Schema
    splits: list[tuple[pa.Table, pa.Table]]
    in_order: bool = False
    best_auc: float | None = None


@dataclass(frozen=True)
class Job:
    """The work of a process: one contender on one fold."""

    contender: str
    space: dict[str, Any] | None
    train: pa.Table
    test: pa.Table
    schema: Schema
    in_order: bool
    trials: int
    members: int
    seed: int
    threads: int


def main() -> None:
    options = _parse()
    try:
        run(options)
    except (ValueError, OSError) as error:
        fail(error)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adult", type=Path, help="adult.data of UCI Adult")
    parser.add_argument("--bank", type=Path, help="bank-full.csv of UCI Bank Marketing")
    parser.add_argument("--simulated", type=int, help="rows of simulated logs, of eight days")
    parser.add_argument("--raw", help="files of training rows, separated by commas")
    parser.add_argument("--test", help="files of test rows")
    parser.add_argument("--schema", help='schema of --raw; "criteo": logs of 40 columns')
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--against", default="lightgbm", help="whom the others are compared with")
    parser.add_argument("--space", type=Path, help="YAML file of what `ours` searches")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--members", type=int, default=5, help="seeds of the best settings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="JSON of all results")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Does what the options say; raises ValueError or OSError for what the user can fix."""
    contenders = _contenders(options.contenders)
    how = {name: getattr(options, name) for name in ("trials", "folds", "members", "seed")}
    space = read_yaml(options.space) if options.space else None
    check_space(space or {}, SETTINGS, str(options.space))
    how["space"] = space
    results = _kept(options.output, json.loads(json.dumps(how)))
    if not (options.adult or options.bank or options.simulated or options.raw):
        raise ValueError("--adult, --bank, --simulated, --raw: expected rows, got none")
    for data in datasets(options):
        for fold, (train, test) in enumerate(data.splits):
            for name in contenders:
                key = f"{data.name}/{name}/{fold}"
                if key in results:
                    continue
                job = Job(
                    name,
                    space if name == "ours" else None,
                    train,
                    test,
                    data.schema,
                    data.in_order,
                    options.trials,
                    options.members,
                    options.seed,
                    options.threads,
                )
                results[key] = _in_a_process(job)
                if options.output:
                    content = {"how": how, "results": results}
                    write_atomically(options.output, json.dumps(content, indent=1) + "\n")
                print(f"{key}: {_line(results[key])}", file=sys.stderr, flush=True)
        print("\n".join(report(data, contenders, results, options.against)), flush=True)
    print("\n".join(_spaces(results)))


def _contenders(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ValueError(f"--contenders {unknown[0]}: expected some of {', '.join(CONTENDERS)}")
    there = [n for n in names if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
    for name in names:
        if name not in there:
            print(f"left out: {name}, which is not installed (pip install -e '.[peers]')")
    return there


def _kept(path: Path | None, how: dict[str, Any]) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    content = read_json(path)
    for name, value in how.items():
        if content["how"].get(name) != value:
            raise ValueError(
                f"--{name} {value}: {path} has results of {content['how'].get(name)}; name "
                "another --output"
            )
    return content["results"]


def _in_a_process(job: Job) -> dict[str, Any]:
    with process_pool(1) as pool:
        return pool.submit(contend, job).result()


def contend(job: Job) -> dict[str, Any]:
    """Tunes and fits a contender, and scores the test rows once."""
    torch.set_num_threads(job.threads)
    warnings.filterwarnings("ignore", module="sklearn|lightgbm")  # on their next versions
    kind = CONTENDERS[job.contender]
    began = time.process_time()
    rows = Rows(*_divided(job.train, job.in_order, job.seed), job.schema)
    space = kind.space(rows)
    if job.space is not None:
        space = job.space
    untuned = {"settings": fixed(space)}
    trials = _tuned(kind, rows, space, job) if len(space) > len(untuned["settings"]) else []
    settings = min(trials, key=lambda one: cost("auc", one["auc"]), default=untuned)["settings"]
    tuned = time.process_time()
    contender = kind(Rows(job.train, None, job.schema), job.threads)
    labels = labels_of(job.test, job.schema)
    logits = []
    members = 1 if kind.deterministic else job.members
    for seed in range(job.seed, job.seed + members):
        logits.append(contender.fit(settings, seed).logits(job.test))
    fitted = time.process_time()
    return {
        "members": [_metrics(one, labels) for one in logits],
        "mean of members": _metrics(np.mean(logits, 0), labels),
        "settings": settings,
        "space": space,
        "trials": trials,
        "tuning_seconds": tuned - began,
        "fit_seconds": (fitted - tuned) / members,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _tuned(kind: Any, rows: Rows, space: Space, job: Job) -> list[dict[str, Any]]:
    """Returns settings and AUC of each trial."""
    contender, trials = kind(rows, job.threads), []
    assert rows.judged is not None
    labels = labels_of(rows.judged, job.schema)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(job.seed))
    for number in range(job.trials):
        drawn = suggest(study.ask(), space) if number else fixed(space)
        try:
            fitted = contender.fit(drawn, job.seed)
        except FloatingPointError:
            trials.append({"settings": drawn, "auc": -1.0})
            continue
        metrics = _metrics(fitted.logits(rows.judged), labels)
        trials.append({"settings": fitted.settings, **metrics})
    return trials


def _divided(table: pa.Table, in_order: bool, seed: int) -> tuple[pa.Table, pa.Table]:
    count = len(table)
    held_out = round(HELD_OUT * count)
    if in_order:
        return table.slice(0, count - held_out), table.slice(count - held_out)
    judged = np.random.default_rng([seed, 1]).permutation(count) < held_out
    return table.filter(pa.array(~judged)), table.filter(pa.array(judged))


def _metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return click_metrics(torch.tensor(logits), torch.tensor(labels, dtype=torch.float32))


def datasets(options: argparse.Namespace) -> Iterator[Data]:
    """Yields what the options name, each when it is its turn."""
    if options.adult:
        yield _adult(options)
    if options.bank:
        yield from _banks(options)
    if options.simulated:
        yield _simulated(options.simulated)
    if options.raw:
        if not options.test or not options.schema:
            raise ValueError("--raw: expected --test and --schema, too")
        criteo = options.schema == "criteo"
        schema = _criteo_schema() if criteo else Schema.load(options.schema)
        train, test = (
            _with_types(read_tables(files.split(","), _CRITEO if criteo else None), schema)
            for files in (options.raw, options.test)
        )
        yield Data(f"{options.raw} → {options.test}", schema, [(train, test)], in_order=True)


def _adult(options: argparse.Namespace) -> Data:
    schema = Schema.from_dict(
        {
            "label": {"column": "income", "positive": ">50K"},
            "missing_values": ["?"],
            "numerical": _ADULT_NUMBERS,
            "categorical": [name for name in _ADULT[:-1] if name not in _ADULT_NUMBERS],
        }
    )
    table = _with_types(read_tables([options.adult], _ADULT), schema)
    return Data("Adult", schema, _folds(table, options.folds, options.seed))


def _banks(options: argparse.Namespace) -> Iterator[Data]:
    table = read_tables([options.bank])
    for name, numbers in (
        ("Bank", _BANK_NUMBERS),
        ("Bank without duration", [name for name in _BANK_NUMBERS if name != "duration"]),
    ):
        texts = [one for one in table.column_names if one not in (*_BANK_NUMBERS, "y")]
        schema = Schema.from_dict(
            {
                "label": {"column": "y", "positive": "yes"},
                "numerical": numbers,
                "categorical": texts,
            }
        )
        rows = _with_types(table, schema)
        yield Data(name, schema, _folds(rows, options.folds, options.seed))


def _simulated(rows: int) -> Data:
    schema = _criteo_schema()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "logs")
        planted = simulate(Simulation(rows=rows), path)
        days = [path / f"day_{day}" for day in range(planted["simulation"]["days"])]
        train = _with_types(read_tables(days[:-1], _CRITEO), schema)
        test = _with_types(read_tables(days[-1:], _CRITEO), schema)
    best = planted["days"][-1]["auc"]
    return Data(f"Simulated logs, {rows:,} rows", schema, [(train, test)], True, best)


def _criteo_schema() -> Schema:
    return Schema.from_dict(
        {
            "label": {"column": "label"},
            "numerical": [{"column": name, "transform": "log"} for name in _CRITEO[1:14]],
            "categorical": [{"column": name, "frequency_limit": 2} for name in _CRITEO[14:]],
        }
    )


def read_tables(paths: Sequence[str | Path], names: Sequence[str] | None = None) -> pa.Table:
    """Reads Parquet, or text without a header where `names` are given; cells are trimmed."""
    return pa.concat_tables(
        [_read_table(Path(path), names) for path in paths], promote_options="permissive"
    )


def _read_table(path: Path, names: Sequence[str] | None) -> pa.Table:
    if path.suffix in (".parquet", ".pq"):
        return pa.parquet.read_table(path)
    with io.TextIOWrapper(open_bytes(path), "utf-8-sig", "surrogateescape", newline="") as file:
        first = file.readline()
        separator = "\t" if "\t" in first else ","
        header = next(csv.reader([first], delimiter=separator), [])
        lines = itertools.chain([first], file)
        text = "".join(_whole_lines(lines, len(names or header), separator))
    return pa.csv.read_csv(
        pa.BufferReader(text.encode("utf-8", "backslashreplace")),
        pa.csv.ReadOptions(column_names=list(names) if names else None),
        pa.csv.ParseOptions(delimiter=separator),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(names or header, pa.string())),
    )


def _whole_lines(lines: Iterable[str], width: int, separator: str) -> Iterator[str]:
    """Yields lines with as many fields as there are columns; those of logs may end early."""
    for line in lines:
        if line := line.rstrip("\r\n"):
            yield line + separator * (width - 1 - line.count(separator)) + "\n"


def _with_types(table: pa.Table, schema: Schema) -> pa.Table:
    """Returns the columns of a schema, trimmed, numbers as float64, missing values as nulls."""
    names = [schema.label.column, *schema.numerical_names, *schema.categorical_names]
    columns = {}
    for name in names:
        if name not in table.column_names:
            raise ValueError(f"column {name}: missing; there are {', '.join(table.column_names)}")
        column = table[name]
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.utf8_trim_whitespace(column)
            missing = pc.is_in(column, pa.array(["", *schema.missing_values], column.type))
            column = pc.if_else(missing, None, column)
        if name in schema.numerical_names:
            column = pc.cast(column, pa.float64())
        columns[name] = column
    return pa.table(columns)


def _folds(table: pa.Table, folds: int, seed: int) -> list[tuple[pa.Table, pa.Table]]:
    if folds < 2:
        raise ValueError(f"--folds {folds}: expected 2 or more")
    fold = np.random.default_rng([seed, 0]).permutation(len(table)) % folds
    return [
        (table.filter(pa.array(fold != number)), table.filter(pa.array(fold == number)))
        for number in range(folds)
    ]


def _line(result: dict[str, Any]) -> str:
    return f"AUC {np.mean([one['auc'] for one in result['members']]):.5f}"


def report(
    data: Data, contenders: Sequence[str], results: dict[str, Any], against: str
) -> list[str]:
    """Returns the tables of a data set."""
    scores: dict[str, dict[str, np.ndarray]] = {}
    costs: dict[str, list[str]] = {}
    for name in contenders:
        folds = [results[f"{data.name}/{name}/{fold}"] for fold in range(len(data.splits))]
        scores[name] = _over([one["members"] for one in folds])
        costs[name] = _costs(folds, 1)
        if (members := len(folds[0]["members"])) > 1:
            mean = f"{name}, mean of {members}"
            scores[mean] = _over([[one["mean of members"]] for one in folds])
            costs[mean] = _costs(folds, members)
    heads = ["contender", *(METRICS[name].title for name in SHOWN)]
    heads += ["tuning CPU s", "fit CPU s", "memory MB"]
    rows = [
        [name, *(_shown(scores[name][metric]) for metric in SHOWN), *costs[name]] for name in scores
    ]
    train, test = data.splits[0]
    lines = [
        "",
        f"{data.name}: {len(train):,} training and {len(test):,} test rows, "
        f"{len(data.splits)} fold{'s' * (len(data.splits) > 1)}",
        *aligned(heads, rows),
    ]
    if data.best_auc is not None:
        lines.append(f"best reachable AUC: {data.best_auc:.5f}")
    if against in scores:
        lines += _paired(scores, against)
    return lines


def _over(folds: Sequence[Sequence[dict[str, float]]]) -> dict[str, np.ndarray]:
    """Returns each metric by fold, the mean of its members; by member where there is one fold."""
    values = {m: np.array([[one[m] for one in fold] for fold in folds]) for m in folds[0][0]}
    return {m: v[0] if len(folds) == 1 else v.mean(1) for m, v in values.items()}


def _shown(values: np.ndarray) -> str:
    deviation = f" ± {values.std(ddof=1):.5f}" if len(values) > 1 else ""
    return f"{values.mean():.5f}{deviation}"


def _costs(folds: Sequence[dict[str, Any]], members: int) -> list[str]:
    tuning, fit, peak = (
        np.mean([one[name] for one in folds])
        for name in ("tuning_seconds", "fit_seconds", "peak_bytes")
    )
    return [f"{tuning:.0f}", f"{fit * members:.1f}", f"{peak / 1e6:.0f}"]


def _paired(scores: dict[str, dict[str, np.ndarray]], against: str) -> list[str]:
    rows = []
    for name, own in scores.items():
        others = scores[against]["auc"]
        if name == against or len(own["auc"]) not in (1, len(others)):
            continue
        difference = own["auc"] - others
        ahead = f"{int((difference > 0).sum())} of {len(difference)}"
        rows.append([name, _shown(difference), ahead])
    return ["", *aligned([f"paired with {against}", "AUC", "ahead"], rows)] if rows else []


def _spaces(results: dict[str, Any]) -> list[str]:
    """Returns the search spaces; those of a contender may differ between data sets."""
    lines = {
        f"{key.rsplit('/', 1)[0]}: {json.dumps(result['space'])}": None
        for key, result in results.items()
        if result["trials"]
    }
    return ["", "searched:", *lines]


if __name__ == "__main__":
    main()
