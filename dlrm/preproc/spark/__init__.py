"""The engine of Spark: its sessions, its tasks on executors, and files without a common folder."""
