"""Until its callers have switched to `dlrm.machine`."""

from dlrm.machine import available_cores, idle_cores

__all__ = ["available_cores", "idle_cores"]
