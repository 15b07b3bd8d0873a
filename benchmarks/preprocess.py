"""Times preprocessing beside NVIDIA-style Spark and Polars, from raw logs to the same dataset.

    python benchmarks/preprocess.py                       all sides in turn, 1 M rows
    python benchmarks/preprocess.py --what tables         the same from a Parquet file, 1 M rows
    python benchmarks/preprocess.py --what tables --format csv      from CSV; jsonl: JSON lines
    python benchmarks/preprocess.py --what files          10,000 files of 100 rows, CSV and Parquet
    python benchmarks/preprocess.py --what parsers        lines a second of the parsers alone
    python benchmarks/preprocess.py --what growth         cost per row, memory and disk by rows
    python benchmarks/preprocess.py --what growth --memory 1GB      or --engine spark
    python benchmarks/preprocess.py --sides local,spark --clone DIR      beside another clone

Every side is a process of its own, with its own start and memory; sides take turns, and the table
has medians. The Polars side needs `pip install polars` and is skipped without it. Memory is what
all processes of a side have at a time besides files, and disk what it writes beside the input.

*NVIDIA-style* does the work of their scripts, on one machine: categorical columns exploded into
pairs and counted, ids by a window over each column, a broadcast join per column, a random sort of
all training rows, Parquet in between, rows of 160 bytes, and these split into files. *Polars* does
the same for a data frame in memory: value counts and a join per column, files written from its
columns.
"""

import argparse
import importlib.util
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import preprocess_tables

from dlrm.data import layout
from dlrm.data.sources.log_lines import LogFormat, parse_lines
from dlrm.scripts.simulate_logs.command import Simulation, simulate

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 15
FORMATS = ("parquet", "csv", "jsonl")
NUMERICAL, CATEGORICAL = range(1, 14), range(14, 40)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=WHAT, default="sides")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the logs (default 1 M)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--sides", help="which, comma-separated; default: all")
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="of tables")
    parser.add_argument("--engine", choices=("local", "spark"), default="local", help="of growth")
    parser.add_argument("--files", type=int, default=10_000, help="of 100 rows each")
    parser.add_argument("--growth", default="1,4,16", help="of growth: millions of rows")
    parser.add_argument("--memory", help="of growth: --memory of our command, such as 1GB")
    parser.add_argument(
        "--clone", type=Path, help="another clone, whose sides run in turn with ours"
    )
    parser.add_argument("--folder", type=Path, help="for logs, which are kept, and outputs")
    parser.add_argument("--side", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(start=0.0)  # seconds of a side until it reads
    options = parser.parse_args()
    if options.side:
        PEERS[options.side](options)
        print(json.dumps(options.start))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = (options.folder or Path(temporary)).resolve()
        WHAT[options.what](options)


def logs(options: argparse.Namespace, rows: int) -> Path:
    """Simulated logs of eight days; ones that are there already are taken."""
    raw = options.folder / f"raw-{rows}"
    if not (raw / "planted.json").exists():
        with open(os.devnull, "w") as nowhere:
            standard, sys.stdout = sys.stdout, nowhere
            simulate(Simulation(rows=rows, days=8), raw)
            sys.stdout = standard
    return raw


def size_of(folder: Path) -> int:
    """Bytes that the files of a folder take on disk."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(parent, name)).st_blocks * 512
    return size


def memory_of(pid: int) -> int:
    """Bytes of a process and those below it, without files; copies share theirs."""
    size = 0
    with suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        size += int(re.search(r"^Pss_Anon: +(\d+) kB", text, re.MULTILINE)[1]) << 10
        for thread in Path(f"/proc/{pid}/task").iterdir():
            size += sum(
                memory_of(int(child)) for child in (thread / "children").read_text().split()
            )
    return size


# What is measured.


def compare_sides(options: argparse.Namespace) -> None:
    compare(options, LOGS, logs(options, options.rows), RATIOS)


def compare_tables(options: argparse.Namespace) -> None:
    raw = options.folder / f"table-{options.rows}.{options.format}"
    if not raw.exists():
        preprocess_tables.write_table(raw, options.rows)
    compare(options, TABLES, raw, TABLE_RATIOS)


def compare_files(options: argparse.Namespace) -> None:
    """Prints the processor time of a small file, in all and beside reading it by Arrow alone."""
    import pyarrow.parquet

    print(f"{options.files:,} files of {preprocess_tables.ROWS_OF_FILE} rows, ms of processor time")
    for kind in ("csv", "parquet"):
        folder = options.folder / f"files-{options.files}-{kind}"
        if not folder.exists():
            preprocess_tables.write_files(folder, options.files, kind)
        ours, arrow = [], []
        for _ in range(options.rounds):
            ours.append(run_side(options, "table_local", folder)["processor"])
            start = time.process_time()
            for path in sorted(folder.iterdir()) if kind == "parquet" else ():
                pyarrow.parquet.read_table(path)
            arrow.append(time.process_time() - start)
        each, alone = (statistics.median(s) / options.files * 1e3 for s in (ours, arrow))
        beside = f", pyarrow.parquet.read_table {alone:.2f}" if kind == "parquet" else ""
        print(f"{kind:<8}ours {each:.2f} a file{beside}", flush=True)


def compare(
    options: argparse.Namespace, sides: list[str], raw: Path, ratios: list[tuple[str, str, int]]
) -> None:
    """Runs sides in turn and prints medians, and ratios of pairs: in all (0) or their rest (1)."""
    names = options.sides.split(",") if options.sides else sides
    if options.clone:
        own = [name for name in names if name in OURS]
        names = [
            side for name in names for side in ((name, name + CLONE) if name in own else (name,))
        ]
        ratios = [*ratios, *((name, name + CLONE, 0) for name in own)]
    if importlib.util.find_spec("polars") is None:
        print("polars is not installed: its side is left out")
        names = [name for name in names if "polars" not in name]
    times: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            times[name].append(run_side(options, name, raw))
    print(f"{options.rows:,} rows, {options.cores} cores, medians of {options.rounds} rounds, s")
    print(f"{'side':<28}{'in all':>8}{'start':>8}{'rest':>8}   us a row   processor")
    medians = {}
    for name, rounds in times.items():
        whole, start = (statistics.median(r[key] for r in rounds) for key in ("whole", "start"))
        medians[name] = (whole, whole - start)
        per_row = (whole - start) / options.rows * 1e6
        used = statistics.median(r["processor"] for r in rounds)
        shown = f"{name:<28}{whole:>8.2f}{start:>8.2f}{whole - start:>8.2f}"
        print(f"{shown}{per_row:>10.2f}{used:>12.2f}")
    for ours, other, part in ratios:
        if ours in medians and other in medians:
            ratio = medians[other][part] / medians[ours][part]
            what = ("in all", "after the start")[part]
            print(f"{other} takes {ratio:.2f} x the time of {ours}, {what}")
            if part == 0:
                pairs = zip(times[ours], times[other], strict=True)
                paired = statistics.median(a["whole"] / b["whole"] for a, b in pairs)
                pairs = zip(times[ours], times[other], strict=True)
                used = statistics.median(a["processor"] / b["processor"] for a, b in pairs)
                print(f"{ours} / {other}, median of rounds: {paired:.2f}, processor {used:.2f}")


def run_side(options: argparse.Namespace, name: str, raw: Path, watched: bool = False) -> dict:
    """Runs a side in a process of its own; returns its times, its memory and its disk."""
    root = options.clone.resolve() if name.endswith(CLONE) else ROOT
    name = name.removesuffix(CLONE)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        output = Path(folder, "output")
        command = [sys.executable, __file__, "--side", name, "--raw", raw]
        command += ["--output", output, "--cores", str(options.cores)]
        if name in OURS:
            of_side = argparse.Namespace(raw=raw, output=output, cores=options.cores)
            command = [*command_of(of_side, name, root), *OURS[name]]
            command += [f"--memory={options.memory}"] * (options.memory is not None)
        places = {"SPARK_LOCAL_DIRS": str(Path(folder, "spark")), "PYTHONPATH": str(root)}
        most, over = {"memory": 0, "disk": 0}, threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                most["memory"] = max(most["memory"], memory_of(process.pid))
                most["disk"] = max(most["disk"], size_of(Path(folder)))

        start, before = time.perf_counter(), _processor_seconds()
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, cwd=root, env={**os.environ, **places}
        )
        watcher = threading.Thread(target=watch)
        if watched:
            watcher.start()
        said, errors = process.communicate()
        whole = time.perf_counter() - start
        over.set()
        if watched:
            watcher.join()
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{errors[-2000:]}")
        found = {"whole": whole, "processor": _processor_seconds() - before, **most}
        if name not in OURS:
            return {**found, "start": json.loads(said.splitlines()[-1])}
        stages = re.findall(r"^(\w+): .*? ([\d.]+) s\b", said, re.MULTILINE)
        seconds = sum(float(seconds) for stage, seconds in stages if stage != "start")
        return {**found, "start": whole - seconds, "stages": seconds}


def command_of(options: argparse.Namespace, name: str, root: Path) -> list:
    """Our command, of a clone."""
    engine = "spark" if name.endswith("spark") else "local"
    if name in TABLES:
        return preprocess_tables.command(options, engine)
    words = [sys.executable, "-u", root / "preproc" / "spark_data_utils.py", f"--engine={engine}"]
    words += ["--cores", str(options.cores), "--input_folder", options.raw]
    return [*words, "--output_folder", options.output]


def _processor_seconds() -> float:
    """Returns those of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare_parsers(options: argparse.Namespace) -> None:
    import pyarrow
    import pyarrow.csv

    text = b"".join(p.read_bytes() for p in sorted(logs(options, options.rows).glob("day_*")))
    text = text[: text.rfind(b"\n", 0, 64 << 20) + 1]
    lines, blocks, place = text.count(b"\n"), [], 0
    while place < len(text):
        end = text.find(b"\n", min(place + (4 << 20), len(text) - 1)) + 1
        blocks.append(text[place:end])
        place = end

    def ours() -> None:
        for block in blocks:
            assert parse_lines(block, LogFormat())[1] is None

    # Lines whose last fields are cut off are none for pyarrow: it gets them whole, and hashes as
    # text, of which numbers have yet to be made.
    whole = b"".join(line + b"\t" * (39 - line.count(b"\t")) + b"\n" for line in text.splitlines())
    types = {f"f{i}": pyarrow.int64() if i in NUMERICAL else pyarrow.string() for i in range(40)}

    def arrow() -> None:
        pyarrow.csv.read_csv(
            pyarrow.BufferReader(whole),
            pyarrow.csv.ReadOptions(autogenerate_column_names=True, use_threads=False),
            pyarrow.csv.ParseOptions(delimiter="\t"),
            pyarrow.csv.ConvertOptions(column_types=types),
        )

    sides = {"native": ours, "pyarrow.csv": arrow}
    print(f"one thread, {lines:,} lines of {len(text) / lines:.0f} bytes")
    for name, parse in sides.items():
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            parse()
            seconds.append(time.perf_counter() - start)
        best = statistics.median(seconds)
        print(f"{name:<12}{lines / best / 1e6:8.2f} M lines/s{len(text) / best / 1e6:8.0f} MB/s")


def show_growth(options: argparse.Namespace) -> None:
    print(f"{options.engine} engine, {options.cores} cores, --memory {options.memory}")
    print(
        f"{'rows':>12}{'s':>8}{'us a row':>10}{'processor s':>13}{'memory':>13}{'disk / input':>14}"
    )
    for millions in options.growth.split(","):
        rows = int(float(millions) * 1e6)
        raw = logs(options, rows)
        size = sum(path.stat().st_size for path in raw.glob("day_*"))
        result = run_side(options, options.engine, raw, watched=True)
        seconds = result["stages"]
        print(
            f"{rows:>12,}{seconds:>8.2f}{seconds / rows * 1e6:>10.2f}{result['processor']:>13.1f}"
            f"{result['memory'] / 1e6:>10.0f} MB{result['disk'] / size:>14.2f}",
            flush=True,
        )


# The other sides.


def polars_side(options: argparse.Namespace) -> None:
    """The same dataset out of data frames in memory."""
    os.environ["POLARS_MAX_THREADS"] = str(options.cores)
    import polars as pl

    schema = {f"f{i}": pl.Int64 if i < 14 else pl.String for i in range(40)}
    numbers = [
        (pl.col(f"f{i}").fill_null(0) + 2).clip(1, None).log().cast(pl.Float32).alias(f"f{i}")
        for i in NUMERICAL
    ]
    hashes = [pl.col(f"f{i}").str.to_integer(base=16, dtype=pl.UInt32) for i in CATEGORICAL]
    days = [
        pl.scan_csv(
            path, separator="\t", has_header=False, schema=schema, missing_columns="insert"
        ).select(pl.col("f0").cast(pl.Boolean), *numbers, *hashes)
        for path in sorted(options.raw.glob("day_*"))
    ]
    frames = pl.collect_all(days)
    rows = [len(frame) for frame in frames]
    frame, cardinalities = pl.concat(frames), []
    for i in CATEGORICAL:
        name = f"f{i}"
        counts = frame[name].drop_nulls().value_counts(sort=False)
        kept = counts.filter(pl.col("count") >= LIMIT).sort(
            ["count", name], descending=[True, False]
        )
        size = len(kept) + 1
        kind = getattr(pl, layout.id_dtype(size).name.capitalize())
        ids = kept.select(name, pl.arange(1, size, eager=True).cast(kind).alias("id"))
        joined = frame.select(name).join(ids, on=name, how="left", maintain_order="left")
        frame = frame.with_columns(joined["id"].fill_null(0).alias(name))
        cardinalities.append(size)
    train, last = sum(rows[:-1]), rows[-1]
    parts = {
        "train": frame[:train].sample(fraction=1, shuffle=True, seed=0),
        "test": frame[train : train + last // 2],
        "validation": frame[train + last // 2 :],
    }
    for name, part in parts.items():
        folder = options.output / name
        folder.mkdir(parents=True)
        part["f0"].to_numpy().tofile(folder / "label.bin")
        numerical = part.select(f"f{i}" for i in NUMERICAL).to_numpy().astype(np.float16)
        np.ascontiguousarray(numerical).tofile(folder / "numerical.bin")
        for i in CATEGORICAL:
            part[f"f{i}"].to_numpy().tofile(folder / f"cat_{i - 14}.bin")
    layout.write_model_size(options.output, cardinalities)


def nvidia_style_logs(options: argparse.Namespace) -> None:
    """NVIDIA's way with raw logs, whose last day is divided into two splits."""
    columns = ", ".join(f"_c{i} {'int' if i < 14 else 'string'}" for i in range(40))
    paths = sorted(options.raw.glob("day_*"))

    def splits(spark):
        last = paths[-1].read_bytes().splitlines(keepends=True)
        halves = {"test": last[: len(last) // 2], "validation": last[len(last) // 2 :]}
        for name, lines in halves.items():
            (options.output / f"{name}.txt").write_bytes(b"".join(lines))

        def read(files: list[Path]):
            return spark.read.csv([str(path) for path in files], columns, "\t")

        others = {name: read([options.output / f"{name}.txt"]) for name in halves}
        return read(paths[:-1]), others, read(paths)

    nvidia_style_side(options, splits)


def nvidia_style_table(options: argparse.Namespace) -> None:
    """NVIDIA's way with a table, of which a fifth of the rows are test rows."""

    def splits(spark):
        from pyspark.sql import functions as sql

        names = ["label", *preprocess_tables.NUMBERS, *preprocess_tables.TEXTS]
        frame = spark.read.parquet(str(options.raw)).select(
            *(sql.col(name).alias(f"_c{i}") for i, name in enumerate(names)),
            (sql.rand(0) < 0.2).alias("test"),
        )
        train = frame.where("not test").drop("test")
        return train, {"test": frame.where("test").drop("test")}, train

    nvidia_style_side(options, splits)


def nvidia_style_side(options: argparse.Namespace, splits: Callable) -> None:
    """Data frames of Spark, as NVIDIA's scripts have them; Parquet to binary to split files.

    Args:
        options: the output and the cores.
        splits: a session -> training rows, other splits by name, and rows whose values have ids.
    """
    began = time.perf_counter()
    from pyspark.sql import SparkSession, functions as sql
    from pyspark.sql.window import Window

    options.output.mkdir()
    spark = (
        SparkSession.builder.master(f"local[{options.cores}]")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", str(4 * options.cores))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    options.start = time.perf_counter() - began
    train, others, counted = splits(spark)
    pairs = counted.select(
        sql.posexplode(sql.array(*(f"_c{i}" for i in CATEGORICAL))).alias("column", "value")
    )
    counts = pairs.where("value is not null").groupBy("column", "value").count()
    order = Window.partitionBy("column").orderBy(sql.desc("count"), "value")
    ids = counts.where(f"count >= {LIMIT}").withColumn("id", sql.row_number().over(order))
    ids.write.partitionBy("column").parquet(str(options.output / "models"))
    models = spark.read.parquet(str(options.output / "models")).cache()
    sizes = {row["column"]: row["size"] for row in models.groupBy("column").agg(
        sql.count("*").alias("size")).collect()}  # fmt: skip

    def transformed(frame):
        for i in CATEGORICAL:
            model = models.where(f"column = {i - 14}").select(
                sql.col("value").alias(f"_c{i}"), sql.col("id").alias(f"id{i}")
            )
            frame = frame.join(sql.broadcast(model), f"_c{i}", "left")
        numbers = (
            sql.log(sql.greatest(sql.coalesce(f"_c{i}", sql.lit(0)) + 2, sql.lit(1)))
            .cast("float")
            .alias(f"_c{i}")
            for i in NUMERICAL
        )
        known = (sql.coalesce(f"id{i}", sql.lit(0)).alias(f"_c{i}") for i in CATEGORICAL)
        return frame.select("_c0", *numbers, *known)

    def path_of(name: str) -> str:
        return str(options.output / name)

    shuffled = transformed(train).withColumn("key", sql.rand(0)).sort("key").drop("key")
    shuffled.write.parquet(path_of("train"))
    for name, frame in others.items():
        transformed(frame).write.parquet(path_of(name))
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()  # whose processor time counts
    cardinalities = [sizes.get(i, 0) + 1 for i in range(26)]
    for name in ("train", *others):
        parquet_to_split(options.output, name, cardinalities)
    layout.write_model_size(options.output, cardinalities)


def parquet_to_split(output: Path, name: str, cardinalities: list[int]) -> None:
    """Parquet files to one binary file, and that to a file a feature."""
    import pyarrow.parquet

    with open(output / f"{name}_data.bin", "wb") as file:
        for path in sorted((output / name).glob("*.parquet")):
            table = pyarrow.parquet.read_table(path)
            words = [
                table[f"_c{i}"].to_numpy().astype(np.float32).view(np.int32)
                if i in NUMERICAL
                else table[f"_c{i}"].to_numpy().astype(np.int32)
                for i in range(40)
            ]
            file.write(np.stack(words, axis=1).data)
    rows = np.fromfile(output / f"{name}_data.bin", np.int32).reshape(-1, 40)
    folder = output / "split" / name
    folder.mkdir(parents=True)
    (rows[:, 0] == 1).tofile(folder / "label.bin")
    rows[:, 1:14].copy().view(np.float32).astype(np.float16).tofile(folder / "numerical.bin")
    for i, size in enumerate(cardinalities):
        rows[:, 14 + i].astype(layout.id_dtype(size)).tofile(folder / f"cat_{i}.bin")
    (output / f"{name}_data.bin").unlink()
    shutil.rmtree(output / name)


LOGS = ["local", "local_no_report", "spark", "nvidia_style", "polars"]
TABLES = ["table_local", "table_spark", "table_nvidia_style", "table_polars"]
PEERS = {
    "nvidia_style": nvidia_style_logs,
    "polars": polars_side,
    "table_nvidia_style": nvidia_style_table,
    "table_polars": preprocess_tables.with_polars,
}
OURS = {  # our commands, and further flags
    "local": (),
    "local_no_report": ("--no-report",),
    "spark": (),
    "table_local": (),
    "table_spark": (),
}
CLONE = " of the clone"
RATIOS = [  # ours, another, and whether the start is left out
    ("spark", "nvidia_style", 0),
    ("spark", "nvidia_style", 1),
    ("local_no_report", "polars", 0),
    ("local", "spark", 1),
]
TABLE_RATIOS = [
    ("table_spark", "table_nvidia_style", 0),
    ("table_spark", "table_nvidia_style", 1),
    ("table_local", "table_polars", 0),
    ("table_local", "table_spark", 1),
]
WHAT = {
    "sides": compare_sides,
    "tables": compare_tables,
    "files": compare_files,
    "parsers": compare_parsers,
    "growth": show_growth,
}

if __name__ == "__main__":
    main()
