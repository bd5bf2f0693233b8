"""Whole language models as drafters: separate ones, the target's first layers, its quantised copies."""
