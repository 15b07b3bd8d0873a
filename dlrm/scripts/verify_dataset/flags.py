"""The flags of `dlrm.scripts.verify_dataset`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.data.clicks.config import DataConfig
from dlrm.limits import check_features
from dlrm.settings import REQUIRED, same_setting, setting


@dataclass(frozen=True)
class VerifyConfig:
    """The dataset to check; field names are those of the flags."""

    directory: Path = setting(REQUIRED, "dataset to check", positional=True, uri="read")
    num_numerical_features: int = setting(
        13,
        "number of numerical features of a binary dataset without transform/, which would state it",
        least=0,
    )
    allow_links: bool = same_setting(DataConfig, "allow_links")

    def __post_init__(self) -> None:
        check_features("--num_numerical_features", self.num_numerical_features)
