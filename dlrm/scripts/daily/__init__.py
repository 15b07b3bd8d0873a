"""Follows a log day by day; each day is judged before it is learned."""
