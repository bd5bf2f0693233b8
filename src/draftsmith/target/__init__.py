"""The model to be accelerated, and the memory of what it has read."""

from draftsmith.target.blocks import Blocks, OutOfBlocks
from draftsmith.target.cache import BLOCK, KVCache, keep_path
from draftsmith.target.nodes import Nodes
from draftsmith.target.target import Target
from draftsmith.target.upper import UpperLayers

__all__ = ["BLOCK", "Blocks", "KVCache", "Nodes", "OutOfBlocks", "Target", "UpperLayers", "keep_path"]
