"""`dlrm tune`: searches settings of a training."""
