"""The documented path of `dlrm.data.sources.log_lines`."""

from dlrm.data.sources.log_lines import LogFormat, parse_lines

__all__ = ["LogFormat", "parse_lines"]
