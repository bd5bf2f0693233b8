"""`python -m draftsmith`: the command line."""

from draftsmith.cli import main

main()
