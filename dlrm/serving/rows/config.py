"""The reading of rows to score, as a configuration without torch."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.data import names
from dlrm.data.choices import TABLE_FORMATS
from dlrm.data.clicks.config import DataConfig
from dlrm.data.sources.text_format import TextFormat
from dlrm.files import MANIFEST
from dlrm.settings import same_setting, setting

BATCH_SIZE = 32768  # the default of --test_batch_size
SPLITS = ("test", "validation", "train")
DATASET_TYPES = ("split", "binary")


@dataclass(frozen=True)
class SourceConfig:
    """Configures how rows are read; field names are those of flags.

    Attributes:
        label: None is yes, but errors then propose --nolabel.
        text: format of CSV.
    """

    label: bool | None = setting(
        None,
        "The lines of a log begin with the label; the label of a table is read if it has one; "
        "default: yes",
    )
    split: str = setting("test", "Split of the dataset to score", choices=SPLITS)
    verify_data: str = same_setting(DataConfig, "verify_data")
    allow_links: bool = same_setting(DataConfig, "allow_links")
    dataset_type: str = setting("split", "Type of the dataset", choices=DATASET_TYPES)
    batch_size: int = setting(BATCH_SIZE, "Number of rows scored at a time", least=1)
    input_format: str | None = setting(
        None, "Format of the table; default: by the file's name", choices=TABLE_FORMATS
    )
    text: TextFormat = TextFormat()

    @property
    def labeled(self) -> bool:
        """Returns whether labels are read."""
        return self.label is not False

    def is_dataset(self, path: Path) -> bool:
        """Returns whether a path is a dataset's directory, and not a folder of tables."""
        known = (names.FEATURE_SPEC, names.MODEL_SIZE, MANIFEST)
        is_split = any((path / name).exists() for name in known)
        return path.is_dir() and (self.dataset_type != "split" or is_split)
