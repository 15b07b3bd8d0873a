"""Follows a log day by day: each day is scored before it is learned."""
