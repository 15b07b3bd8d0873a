"""The flags of `dlrm.scripts.checkpoint`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, check_settings, setting

FEATURE_ORDERS = ("natural", "size_sorted", "device_mapping")
PADDINGS = ("one", "multiple_of_8")


@dataclass(frozen=True)
class CheckpointConfig:
    """A task and its options; field names are those of the flags."""

    command: str = setting(REQUIRED, "inspect or convert", positional=True)
    directory: Path = setting(
        REQUIRED,
        "checkpoint to inspect or convert",
        positional=True,
        uri="read, *",  # also all checkpoints of a run
    )
    json: bool = setting(False, "inspect: print one JSON object, for programs")
    check: bool = setting(False, "inspect: also compare the checksums of tables that are not read")
    weights: bool = setting(
        True, "inspect: read the weights and report their norms, NaN and infinities"
    )
    to: str | None = setting(None, "convert: format to write", choices=("nvidia", "dlrm"))
    output: str | None = setting(None, "convert: directory to write, new or empty", uri="write")
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
