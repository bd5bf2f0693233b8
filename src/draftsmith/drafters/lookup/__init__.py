"""Drafters without weights, in plain Python: they guess what followed the newest tokens earlier."""
