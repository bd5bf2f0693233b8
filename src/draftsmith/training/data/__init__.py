"""Training text: sources, windows, texts written by the target, batches."""
