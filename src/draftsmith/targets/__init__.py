"""The model to be accelerated, and the memory of what it has read."""

from draftsmith.targets.cache.blocks import Blocks, OutOfBlocks
from draftsmith.targets.cache.cache import BLOCK, KVCache, keep_path
from draftsmith.targets.cache.nodes import Nodes
from draftsmith.targets.sublayers import Skipped
from draftsmith.targets.target import Target
from draftsmith.targets.upper import UpperLayers

__all__ = ["BLOCK", "Blocks", "KVCache", "Nodes", "OutOfBlocks", "Skipped", "Target", "UpperLayers", "keep_path"]
