"""Former names, until their callers call `dlrm.remote.objects`."""

from dlrm.remote.objects import find_entries, open_store  # noqa: F401
