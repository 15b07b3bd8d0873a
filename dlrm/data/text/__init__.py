"""The former path of `dlrm.language.data`; the next version removes it."""

from dlrm.language.data import TextLoader

__all__ = ["TextLoader"]
