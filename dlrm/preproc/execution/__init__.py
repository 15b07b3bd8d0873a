"""Execution of tasks: processes of this machine or Spark, and state that survives a kill."""
