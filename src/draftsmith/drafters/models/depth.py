"""The depth to which a whole model may guess."""

MAX_DEPTH = 128
"""The longest chain of guesses that a model is asked for."""
