"""The model to be accelerated, and the memory of what it has read."""

from draftsmith.target.cache import KVCache, keep_path
from draftsmith.target.target import Target

__all__ = ["KVCache", "Target", "keep_path"]
