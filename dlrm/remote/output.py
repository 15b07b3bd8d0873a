"""Former names, until their callers call `dlrm.remote.publish`."""

from dlrm.remote.publish import Output  # noqa: F401
