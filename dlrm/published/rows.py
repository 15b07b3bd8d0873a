"""The rows of the five source documents, read from `documents`, and the rules of measurement.

A file has groups of rows. The fields of a group are those of its rows, and flags of a row follow
those of its group.
"""

import difflib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlrm.documents import read_yaml

DOCUMENTS = {
    "000": "Habana, PyTorch models for Gaudi",
    "001": "NVIDIA, DLRM for PyTorch",
    "002": "OneFlow, DLPerf",
    "003": "Graphcore, CNNs on IPUs",
    "004": "Graphcore, BERT on IPUs (PopART)",
}
_FILES = ("gaudi", "nvidia", "dlperf", "ipu_cnn", "ipu_bert")
QUANTITIES = {  # measured quantity -> its name before a figure
    "throughput": "",  # stated by the unit
    "auc": "",
    "accuracy": "accuracy",
    "minutes": "time to train",
    "scaling": "scaling efficiency",
    "speedup": "speed-up of mixed precision",
}


@dataclass(frozen=True)
class Figure:
    """A published number.

    Attributes:
        value: the number as printed, in `unit`.
        unit: as in the document, such as "images/sec".
        quantity: key of `QUANTITIES`: the measured quantity.
        system: system of the number, if the document compares several, such as "OneFlow".
    """

    value: float
    unit: str
    quantity: str = "throughput"
    system: str = ""

    def __str__(self) -> str:
        shown = f"{self.value:.15g} {self.unit}"
        if name := QUANTITIES[self.quantity]:
            shown = f"{name} {shown}"
        return f"{self.system} {shown}".strip()


@dataclass(frozen=True)
class Rule:
    """A document's rule for measuring a row.

    Attributes:
        title: the rule in one line.
        repeats: runs, each in fresh processes.
        flags: flags that the rule adds to the row's command line.
        quantity: reported quantity: "throughput", or a metric of the trained model.
        values: source of a run's value: "summary", the throughput that the command reports,
            which leaves the warm-up out; or "series", one for each logged step.
        drop: first values of each run's series to leave out.
        statistic: "median" or "mean" of the values.
    """

    title: str
    repeats: int = 1
    flags: tuple[str, ...] = ()
    quantity: str = "throughput"
    values: str = "summary"
    drop: int = 0
    statistic: str = "mean"


_STEPS_120 = ("--max_steps=120", "--benchmark_warmup_steps=20")
RULES = {
    "dlperf": Rule(
        "7 fresh runs of 120 steps, the first 20 dropped, 100 timed; median",
        repeats=7,
        flags=_STEPS_120,
        statistic="median",
    ),
    "gaudi": Rule("one run of 120 steps, the first 20 dropped", flags=_STEPS_120),
    "gaudi_pretraining": Rule(
        "one run of 6 steps of hundreds of micro-batches, the first dropped",
        flags=("--max_steps=6", "--benchmark_warmup_steps=1"),
    ),
    "ipu": Rule(
        "a throughput for each logged step, the first dropped; mean",
        flags=("--print_freq=1",),
        values="series",
        drop=1,
    ),
    "ipu_inference": Rule("10 passes in one process, the first dropped; mean"),
    "nvidia": Rule(
        "one run of 1,000 steps, the first 500 dropped",
        flags=("--max_steps=1000", "--benchmark_warmup_steps=500"),
    ),
    "nvidia_inference": Rule("200 batches of each size; mean throughput of the largest"),
    "checkpoint": Rule("one test of a checkpoint; its metric", quantity="metric"),
    "result": Rule("one training to its end; the metric of its test", quantity="metric"),
}


@dataclass(frozen=True)
class BenchmarkRow:
    """One row of the catalog.

    Attributes:
        id: unique name, "source/system/variant".
        source: the document and the row of the inventory, such as "003 C6".
        command: module of `dlrm.scripts` that runs it.
        flags: its command line without the data.
        quotation: the document's words about it.
        rule: key of `RULES`: how it is measured.
        published: the document's figures, if it prints any.
        hardware: hardware of the published figures.
        processes: replicas, with one process each.
        nodes: machines that the processes are on.
        data: the dataset that it needs; None if `flags` choose generated data.
        data_flags: flags that replace `--dataset` without a dataset.
        printed: the command line that the document prints, if it prints one.
        measure: "run", or "trend", "scaling" or "seeds" for rows that compare runs of `of`.
        of: the row whose runs are compared.
        against: for a trend or seeds, the row beside it.
        notes: the interpretation of the document.
        differs: differences from the document's system other than flags of `printed`.
    """

    id: str
    source: str
    command: str
    flags: tuple[str, ...]
    quotation: str
    rule: str
    published: tuple[Figure, ...] = ()
    hardware: str = ""
    processes: int = 1
    nodes: int = 1
    data: str | None = "imagenet"
    data_flags: tuple[str, ...] = ("--data=generated",)
    printed: str | None = None
    measure: str = "run"
    of: str | None = None
    against: str | None = None
    notes: str = ""
    differs: tuple[str, ...] = ()

    def arguments(self, dataset: str | None = None) -> list[str]:
        """Returns the command line; without a dataset, data are generated."""
        if self.data is None:
            return list(self.flags)
        return [*self.flags, *((f"--dataset={dataset}",) if dataset else self.data_flags)]

    @property
    def given(self) -> dict[str, str]:
        """The values of `flags`, by name."""
        return dict(flag.removeprefix("--").partition("=")[::2] for flag in self.flags)

    @property
    def parts(self) -> int:
        """Returns the number of pipeline parts of the network in the document; 1 for none."""
        if layers := self.given.get("layers_per_stage"):
            return len(layers.split(",")) + int(self.given.get("encoder_start_stage", "0"))
        return len([name for name in self.given.get("pipeline_splits", "").split(",") if name]) + 1

    @property
    def model(self) -> str:
        """The network, such as "resnet50" or "bert-large"."""
        given = self.given
        if self.command == "cnn":
            return given.get("model", "any")
        if self.command != "bert":
            return "dlrm"
        return f"bert-{given.get('size', 'base_3layer')}"

    @property
    def samples(self) -> str:
        """The document's word for samples, such as "images"."""
        if self.command in ("cnn", "bert"):
            return {"cnn": "images", "bert": "sequences"}[self.command]
        return "queries" if self.source.startswith("000") else "items"

    @property
    def grid(self) -> str:
        """Nodes and devices as DLPerf writes them, such as "2n16d"."""
        return f"{self.nodes}n{self.processes}d"


@cache
def catalog() -> Mapping[str, BenchmarkRow]:
    """Returns all rows, by their names."""
    rows: dict[str, BenchmarkRow] = {}
    for name in _FILES:
        for row in _read(Path(__file__).with_name("documents") / f"{name}.yaml"):
            assert row.id not in rows, f"two rows have the name {row.id}"
            rows[row.id] = row
    return rows


def _read(path: Path) -> Iterator[BenchmarkRow]:
    document = read_yaml(path)
    for group in document["groups"]:
        for own in group.pop("rows"):
            fields = {**group, **own}
            fields["source"] = f"{document['source']} {fields.pop('item')}"
            fields["flags"] = tuple(shlex.split(f"{group.get('flags', '')} {own.get('flags', '')}"))
            fields["published"] = tuple(Figure(**one) for one in fields.get("published", ()))
            fields["differs"] = tuple(fields.get("differs", ()))
            if "data_flags" in fields:
                fields["data_flags"] = tuple(shlex.split(fields["data_flags"]))
            yield BenchmarkRow(**fields)


def select(source: str | None = None, model: str | None = None) -> list[BenchmarkRow]:
    """Returns the rows of a document and a model; None selects all.

    Raises:
        ValueError: an unknown document, or a model that no row has.
    """
    if source is not None and source not in DOCUMENTS:
        raise ValueError(f"--source {source}: expected one of {', '.join(DOCUMENTS)}")
    models = sorted({row.model for row in catalog().values()})
    if model is not None and model not in models:
        raise ValueError(f"--model {model}: expected one of {', '.join(models)}")
    return [
        row
        for row in catalog().values()
        if (source is None or row.source.startswith(source)) and model in (None, row.model)
    ]


def find(name: str) -> BenchmarkRow:
    """Returns a row by its name.

    Raises:
        ValueError: there is none; the nearest names are listed.
    """
    rows = catalog()
    if name in rows:
        return rows[name]
    inside = [key for key in rows if name and name in key]
    near = difflib.get_close_matches(name, rows, n=4, cutoff=0.5) or inside[:4]
    hint = f"nearest: {', '.join(near)}" if near else "`list` shows all rows"
    raise ValueError(f"{name or '(no name)'}: no such row; {hint}")
