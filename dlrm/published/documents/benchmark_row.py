"""A benchmark row: a configuration of a source document, with its published figures."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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


QUANTITIES = {  # measured quantity -> its name before a figure
    "throughput": "",  # stated by the unit
    "auc": "",
    "accuracy": "accuracy",
    "minutes": "time to train",
    "scaling": "scaling efficiency",
    "speedup": "speed-up of mixed precision",
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
        rule: key of `dlrm.published.documents.measurement.RULES`: how it is measured.
        published: the document's figures, if it prints any.
        hardware: hardware of the published figures.
        processes: replicas, with one process each.
        nodes: machines that the processes are on.
        data: the dataset that it needs; None if `flags` choose generated data.
        data_flags: flags that replace `--dataset` without a dataset.
        printed: the command line that the document prints, if it prints one.
        measure: "run", or "trend", "scaling" or "seeds" for rows that compare runs of `of`.
        of: the row whose runs are compared.
        against: for a trend, the row with the reference losses.
        notes: the interpretation of the document.
        approximated: differences from the document's system other than flags of `printed`.
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
    approximated: tuple[str, ...] = ()

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


def by_id(rows: Iterable[BenchmarkRow]) -> dict[str, BenchmarkRow]:
    """Returns the rows by their names, which must differ."""
    rows = list(rows)
    result = {row.id: row for row in rows}
    assert len(result) == len(rows), "two rows have the same name"
    return result


def find(rows: Mapping[str, BenchmarkRow], name: str) -> BenchmarkRow:
    """Returns a row by its name.

    Raises:
        ValueError: there is none; the nearest names are listed.
    """
    if name in rows:
        return rows[name]
    inside = [key for key in rows if name and name in key]
    near = difflib.get_close_matches(name, rows, n=4, cutoff=0.5) or inside[:4]
    hint = f"nearest: {', '.join(near)}" if near else "`list` shows all rows"
    raise ValueError(f"{name or '(no name)'}: no such row; {hint}")
