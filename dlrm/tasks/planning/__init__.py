"""Placement of tables and its predicted costs, before anything is made."""
