"""Decoding: requests, steps and the engine that runs them."""

from draftsmith.engine.engine import Chunk, Engine, Prompt

__all__ = ["Chunk", "Engine", "Prompt"]
