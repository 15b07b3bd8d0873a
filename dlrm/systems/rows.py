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
        system: whose number it is, where the document compares several, such as "OneFlow".
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
    "throughput": "",  # the unit says it
    "auc": "",
    "accuracy": "accuracy",
    "minutes": "time to train",
    "scaling": "scaling efficiency",
    "speedup": "speed-up of mixed precision",
}


@dataclass(frozen=True)
class System:
    """One row of the catalogue.

    Attributes:
        id: unique name, "source/system/variant".
        source: the document and the row of the inventory, such as "003 C6".
        command: module of `dlrm.scripts` that runs it.
        flags: its command line without the data.
        quotation: what the document says of it, in the document's words.
        rule: key of `dlrm.systems.measurement.RULES`: how it is measured.
        published: the document's figures, if it prints any.
        hardware: what the published figures were measured on.
        processes: replicas, a process each.
        nodes: machines that the processes are on.
        data: the dataset that it needs; None where `flags` choose made-up data.
        data_flags: what replaces `--dataset` where there is no dataset.
        printed: the command line that the document prints, if it prints one.
        measure: "run", or "trend", "scaling" or "seeds" for rows that compare runs of `of`.
        of: the row whose runs are compared.
        against: of a trend, the row whose losses are the reference.
        notes: which reading of the document this is.
        approximated: what differs from the document's system and is not a flag of `printed`.
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
        """Parts that the document divides the network into, as a pipeline; 1 for none."""
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


def by_id(rows: Iterable[System]) -> dict[str, System]:
    """Returns the rows by their names, which must differ."""
    rows = list(rows)
    result = {row.id: row for row in rows}
    assert len(result) == len(rows), "two rows have the same name"
    return result


def find(rows: Mapping[str, System], name: str) -> System:
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
