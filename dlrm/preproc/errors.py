"""Errors of engines, which commands report."""


class TaskError(RuntimeError):
    """A function failed on its input or its output; the message is its own."""


class EngineError(RuntimeError):
    """Functions could not be run: Spark is missing, or a process was killed repeatedly."""
