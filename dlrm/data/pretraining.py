"""The documented path of `dlrm.language.pretraining.dataset`."""

from dlrm.language.pretraining.dataset import open_pretraining

__all__ = ["open_pretraining"]
