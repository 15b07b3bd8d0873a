"""How stages of tasks run: in processes of this machine or on Spark, and what outlives a kill."""
