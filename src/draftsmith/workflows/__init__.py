"""Whole jobs, as the commands do them and as Python calls them: train, compare, prove, check, bench.

Each is a function with typed arguments and a typed result, whose `as_json` is what the command writes to `--json`.
"""
