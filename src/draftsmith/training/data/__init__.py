"""Training text: sources, windows, text of the target's own, batches."""
