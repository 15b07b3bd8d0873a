"""The former path of `dlrm.language.pretraining.dataset`; the next version removes it."""

from dlrm.language.pretraining.dataset import open_pretraining

__all__ = ["open_pretraining"]
