"""Sessions of training commands: processes, log, checkpoints and exit codes."""
