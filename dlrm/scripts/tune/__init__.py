"""`python -m dlrm.scripts.tune`: searches settings of a training."""
