"""Training of speculators: data, losses, checkpoints and the two-stage run."""
