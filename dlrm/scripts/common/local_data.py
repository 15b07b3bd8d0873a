"""The dataset of a training command as files of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.edges import fetched, show_uris
from dlrm.remote.uri import Uri, is_uri


@contextmanager
def with_local_data(values: Values) -> Iterator[Values]:
    """Yields the flags with a local path for a `--dataset` that is a URI.

    What the process prints has the URI again, as have the records of the run.

    Raises:
        OSError, ValueError: the dataset cannot be read, or does not fit; the message has the URI.
    """
    if not is_uri(values["dataset"]):
        yield values
        return
    show_uris()
    with fetched(Cache.of_flags(values), Uri.parse(values["dataset"])) as path:
        yield values.replaced({"dataset": str(path)})
