"""Until its callers have switched to `dlrm.machine`."""

from dlrm.machine import host_memory, machine

__all__ = ["host_memory", "machine"]
