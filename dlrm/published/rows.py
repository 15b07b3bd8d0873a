"""The rows of the five source documents, read from `documents`, and the rules of measurement.

A file is a tree: the fields of a group are those of its rows, and the flags of a row follow those
of its groups. A row that compares runs of another has the fields of that one, but for those that
it states.
"""

import difflib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dlrm.documents import read_yaml

DOCUMENTS = {
    "000": "Habana, PyTorch models for Gaudi",
    "001": "NVIDIA, DLRM for PyTorch",
    "002": "OneFlow, DLPerf",
    "003": "Graphcore, CNNs on IPUs",
    "004": "Graphcore, BERT on IPUs (PopART)",
}
_FILES = ("gaudi", "nvidia", "dlperf", "ipu_cnn", "ipu_bert")
_FOLDER = Path(__file__).with_name("documents")
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
        words = (self.system, QUANTITIES[self.quantity], f"{self.value:.15g}", self.unit)
        return " ".join(filter(None, words))


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


@dataclass(frozen=True)
class BenchmarkRow:
    """One row of the catalog.

    Attributes:
        id: unique name, "source/system/variant".
        source: key of `DOCUMENTS`.
        command: module of `dlrm.scripts` that runs it.
        flags: its command line without the data.
        smoke: more flags, which reduce it to two steps or passes of seconds on a CPU.
        samples: the document's word for samples, such as "images".
        quotation: the document's words about it.
        rule: how it is measured.
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
    smoke: tuple[str, ...]
    samples: str
    quotation: str
    rule: Rule
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
    def model(self) -> str:
        """The network, such as "resnet50" or "bert-large"."""
        if self.command == "bert":
            return f"bert-{self.given['size']}"
        return self.given.get("model", "any") if self.command == "cnn" else "dlrm"

    @property
    def grid(self) -> str:
        """Nodes and devices as DLPerf writes them, such as "2n16d"."""
        return f"{self.nodes}n{self.processes}d"


@cache
def rules() -> Mapping[str, Rule]:
    """Returns the rules of measurement, by their names."""
    found = read_yaml(_FOLDER / "rules.yaml")
    return {
        name: Rule(**{**own, "flags": tuple(shlex.split(own.get("flags", "")))})
        for name, own in found.items()
    }


@cache
def catalog() -> Mapping[str, BenchmarkRow]:
    """Returns all rows, by their names."""
    rows: dict[str, BenchmarkRow] = {}
    for name in _FILES:
        for fields in _leaves(read_yaml(_FOLDER / f"{name}.yaml"), {}):
            base = vars(rows[fields["of"]]) if "of" in fields else {}
            row = BenchmarkRow(**{**base, **fields})
            assert row.id not in rows, f"two rows have the name {row.id}"
            rows[row.id] = row
    return rows


def _leaves(node: Mapping[str, Any], above: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the fields of each row of a group, with those of the groups above."""
    fields = {**above, **node}
    for name in {"flags", "smoke", "data_flags"} & node.keys():
        own = tuple(shlex.split(node[name]))
        fields[name] = own if name == "data_flags" else (*above.get(name, ()), *own)
    if "rule" in node:
        fields["rule"] = rules()[node["rule"]]
    if "published" in node:
        fields["published"] = tuple(Figure(**one) for one in node["published"])
    if "differs" in node:
        fields["differs"] = tuple(node["differs"])
    inner = fields.pop("rows", None)
    if inner is None:
        yield fields
    for one in inner or ():
        yield from _leaves(one, fields)


def select(source: str | None = None, model: str | None = None) -> list[BenchmarkRow]:
    """Returns the rows of a document and a model; None selects all.

    Raises:
        ValueError: an unknown document, or a model that no row has.
    """
    models = sorted({row.model for row in catalog().values()})
    for flag, value, known in (("source", source, DOCUMENTS), ("model", model, models)):
        if value is not None and value not in known:
            raise ValueError(f"--{flag} {value}: expected one of {', '.join(known)}")
    return [
        row
        for row in catalog().values()
        if source in (None, row.source) and model in (None, row.model)
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
