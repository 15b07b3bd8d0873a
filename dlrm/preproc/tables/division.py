"""The former place of `SplitConfig`, for one version."""

from dlrm.preproc.stages.division import SplitConfig as SplitConfig

__all__ = ["SplitConfig"]
