"""The model to be accelerated, and the memory of what it has read."""

from draftsmith.target.cache import KVCache, keep_path
from draftsmith.target.target import Target
from draftsmith.target.upper import UpperLayers

__all__ = ["KVCache", "Target", "UpperLayers", "keep_path"]
