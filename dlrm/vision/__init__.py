"""Image networks, their data, task, flags and command."""
