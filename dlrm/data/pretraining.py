"""The documented path of `dlrm.data.text.pretraining.dataset`."""

from dlrm.data.text.pretraining.dataset import open_pretraining

__all__ = ["open_pretraining"]
