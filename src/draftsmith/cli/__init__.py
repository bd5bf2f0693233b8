"""The command line `draftsmith`."""

from draftsmith.cli.app import app, main

__all__ = ["app", "main"]
