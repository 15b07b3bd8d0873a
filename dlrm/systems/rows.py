"""A benchmark row: a configuration that a source document names, with what was published of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One row.

    Attributes:
        id: unique name, "source/system/variant".
        source: the document and the row of the inventory.
        command: module of `dlrm.scripts` that runs it.
        flags: its command line but for the data.
        published: figure of the source, as printed there; None where there is none.
        processes: replicas, a process each.
        nodes: machines that the processes are on.
        data: what the dataset is that is to be named; None where `flags` choose made-up data.
        notes: which reading of the source this is.
        ignored: options of the source that mean nothing here.
    """

    id: str
    source: str
    command: str
    flags: tuple[str, ...]
    published: str | None = None
    processes: int = 1
    nodes: int = 1
    data: str | None = "imagenet"
    notes: str = ""
    ignored: tuple[str, ...] = ()

    def arguments(self, dataset: str | None = None) -> list[str]:
        """Returns the command line; without a dataset, data are generated."""
        if self.data is None:
            return list(self.flags)
        return [*self.flags, f"--dataset={dataset}" if dataset else "--data=generated"]


def by_id(rows: list[System]) -> dict[str, System]:
    """Returns the rows by their names, which must differ."""
    result = {row.id: row for row in rows}
    assert len(result) == len(rows), "two rows have the same name"
    return result
