"""Drafters without weights, in plain Python: what followed the newest tokens before."""
