"""Where tables should be, and what that costs: predicted before anything is made."""
