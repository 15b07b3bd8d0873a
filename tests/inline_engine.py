"""An engine of preparation that runs tasks in this process."""

from dlrm.preproc.execution.engines import TaskError


class InlineEngine:
    """Runs tasks in this process, one after another, for small inputs."""

    cores = 1
    is_distributed = False

    def run(self, stage, task, items):
        """Calls a task with every item; see `Engine`."""
        for item in items:
            try:
                task(item)
            except (ValueError, OSError) as error:
                raise TaskError(str(error)) from error
