"""The flags of `dlrm.scripts.checkpoint`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, check_settings, setting

FEATURE_ORDERS = ("natural", "size_sorted", "device_mapping")
PADDINGS = ("one", "multiple_of_8")


@dataclass(frozen=True)
class CheckpointConfig:
    """A task and its options; field names are those of the flags."""

    command: str = setting(REQUIRED, "inspect, diff, convert, grow or evict", positional=True)
    directories: tuple[Path, ...] = setting(
        (),
        "checkpoint to inspect or change, or two of them for diff",
        positional=True,
        uri="read, *",  # also all checkpoints of a run
    )
    json: bool = setting(False, "inspect, diff: print one JSON object, for programs")
    check: bool = setting(False, "inspect: also compare the checksums of tables that are not read")
    weights: bool = setting(
        True, "inspect: read the weights and report their norms, NaN and infinities"
    )
    chain: bool = setting(
        False,
        "inspect: verify and show the days of a dataset or checkpoint that prepare --extend made",
    )
    rtol: float = setting(0.0, "diff: relative tolerance", least=0)
    atol: float = setting(0.0, "diff: absolute tolerance", least=0)
    weights_only: bool = setting(False, "diff: compare only the model's weights")
    to: str | None = setting(None, "convert: format to write", choices=("nvidia", "dlrm"))
    output: str | None = setting(
        None, "convert, grow, evict: directory to write, new or empty", uri="write"
    )
    dataset: str | None = setting(
        None,
        "grow: dataset with the new table sizes, whose dictionaries begin with the checkpoint's",
        uri="read",
    )
    table_sizes: tuple[int, ...] | None = setting(
        None, "grow: new number of rows of each table", least=0
    )
    rows: str | None = setting(
        None, "evict: CSV file with the header table,row, both counted from 0", uri="read"
    )
    feature_order: str | None = setting(
        None,
        "Order of the vectors in NVIDIA's directory: natural (2020 on one GPU, or with "
        "--bottom_features_ordered on several), size_sorted (later versions on one GPU), "
        "device_mapping (of several GPUs). Default: as its metadata say; natural where one is "
        "written",
        choices=FEATURE_ORDERS,
    )
    interaction_padding: str | None = setting(
        None,
        "convert --to nvidia: zeros after the dots: one (versions of 2020), or to a multiple of 8 "
        "(later ones). Default: as in the directory that the model came from, else multiple_of_8",
        choices=PADDINGS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
