"""Packages that stand in for those of other environments; their folder goes on the path of another process."""
