"""Decoding: the core that steps, and its interfaces: a blocking engine and one for asyncio."""

from draftsmith.engine.async_engine import AsyncEngine, ClosedError
from draftsmith.engine.core import EngineCore, Progress
from draftsmith.engine.engine import Chunk, Engine
from draftsmith.engine.limits import Limits
from draftsmith.engine.policy import Choice, Fixed, Load, OffAbove, Policy, RowHistory
from draftsmith.engine.requests.admission import Prompt
from draftsmith.targets.token_ids import Conversation

__all__ = [
    "AsyncEngine", "Choice", "Chunk", "ClosedError", "Conversation", "Engine", "EngineCore", "Fixed", "Limits", "Load",
    "OffAbove", "Policy", "Progress", "Prompt", "RowHistory",
]
