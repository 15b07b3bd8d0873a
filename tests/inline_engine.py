"""An engine of preparation that runs functions in this process."""

from concurrent.futures import Executor, Future

from dlrm.preproc.duckdb_engine import DuckDbEngine


class _Inline(Executor):
    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class InlineEngine(DuckDbEngine):
    """Calls functions in this process, one after another, for small inputs."""

    def __init__(self, cores=1, memory=1 << 28):
        super().__init__(_Inline, cores, None, memory)
