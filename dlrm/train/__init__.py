"""Training: the loop, optimizers, schedule, metrics, checkpoints and logs. It knows no model."""
