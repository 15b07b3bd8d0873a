"""The documented path of `dlrm.data.clicks.datasets`."""

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Datasets, open_datasets

__all__ = ["DataConfig", "Datasets", "open_datasets"]
