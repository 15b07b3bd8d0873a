"""The flags of `dlrm.scripts.schema`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, setting

CROSS_BUCKETS = 100_000


@dataclass(frozen=True)
class DraftConfig:
    """The tables, and the roles of their columns; field names are those of the flags."""

    input: tuple[str, ...] = setting(REQUIRED, "files, or directories of files", uri="read")
    label: str = setting(REQUIRED, "column of the label")
    output: Path = setting(Path("schema.yaml"), "file to write", uri="write")
    positive: str | None = setting(
        None,
        "label that counts as 1, or several with commas between them; default: of two labels, the "
        "affirmative or the rarer one",
    )
    weight: str | None = setting(None, "column of sample weights")
    groups: tuple[str, ...] = setting((), "columns to group metrics by, such as the user")
    time: str | None = setting(None, "column of the time; default: the first one found")
    cross: tuple[str, ...] = setting(
        (),
        f"FIELDS or FIELDS:BUCKETS, such as user,item:100000: a cross of categorical fields; "
        f"default: {CROSS_BUCKETS} buckets",
        repeated=True,
    )
    rows: int = setting(1_000_000, "maximum rows to read", least=1)
    overwrite: bool = setting(False, "replace an earlier file")
