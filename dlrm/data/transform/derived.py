"""Fields that are made of others, as a schema names them: crosses of categorical fields."""

from dataclasses import dataclass

from dlrm.documents import brief


@dataclass(frozen=True)
class Cross:
    """A categorical field whose values are the combinations of values of other fields.

    Attributes:
        fields: columns of two or more categorical fields, of one value a row.
        name: of the field; None is the columns, joined by "_x_".
        buckets: how many ids the combinations without one of their own share, by hash; 0 gives
            them id 0, which is that of rows in which a value is missing.
        frequency_limit: combinations in this many training rows have ids of their own; None gives
            no combination one.
        max_ids: how many combinations have ids of their own, the most frequent ones; None for all.
    """

    fields: tuple[str, ...]
    name: str | None = None
    buckets: int = 0
    frequency_limit: int | None = None
    max_ids: int | None = None

    def __post_init__(self) -> None:
        where = f"cross {self.column}"
        if len(self.fields) < 2 or len(set(self.fields)) < len(self.fields):
            raise ValueError(
                f"{where}: fields: expected two or more different ones, got "
                f"{brief(list(self.fields))}"
            )
        if self.frequency_limit is None:
            if self.buckets < 1:
                raise ValueError(
                    f"{where}: buckets: expected 1 or more, or a frequency_limit, which gives "
                    f"combinations ids of their own, got {self.buckets}"
                )
            if self.max_ids is not None:
                raise ValueError(f"{where}: max_ids: expected a frequency_limit too, got none")

    @property
    def column(self) -> str:
        """`name`, or what None stands for."""
        return self.name or "_x_".join(self.fields)
