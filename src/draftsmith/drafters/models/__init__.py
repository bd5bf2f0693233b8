"""Whole language models as drafters: separate ones, the target's first layers, its int8 copy."""
