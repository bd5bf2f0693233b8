"""Decoding: requests, steps and the engine that runs them."""

from draftsmith.engine.admission import Prompt
from draftsmith.engine.engine import Chunk, Engine

__all__ = ["Chunk", "Engine", "Prompt"]
