"""The dataset of a training command as files of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from dlrm.command_line import say
from dlrm.data.clicks.published import local_dataset
from dlrm.distributed import launch
from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.edges import show_uris
from dlrm.remote.uri import Uri, is_uri


@contextmanager
def with_local_data(values: Values) -> Iterator[Values]:
    """Yields the flags with a local path for a `--dataset` that is a URI.

    What the process prints has the URI again, as have the records of the run.
    """
    if not is_uri(values["dataset"]):
        yield values
        return
    show_uris()
    process = launch()

    def note(line: str) -> None:
        if process.rank == 0:
            shuffled = values["shuffle_batch_order"] and values["mode"] == "train"
            say(f"note: {line}{_SHUFFLED if shuffled else ''}")

    cache, uri = Cache.of_flags(values), Uri.parse(values["dataset"])
    with local_dataset(cache, uri, process.local_size, note) as path:
        yield values.replaced({"dataset": str(path)})


_SHUFFLED = (
    "; --shuffle_batch_order jumps between blocks of 4 MiB, so most are fetched again and again"
)
