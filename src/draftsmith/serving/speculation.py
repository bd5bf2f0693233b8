"""Reads the plan and the drafter that a request asks for itself."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import published_trees
from draftsmith.engine.limits import DRAFT_ROOM
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import Speculation
from draftsmith.serving.settings import Settings
from draftsmith.types import DraftsmithError

FIELD = "speculation"


class Drafting(NamedTuple):
    """The plan and the drafter that a request asks for; where both are None, the server decides."""

    plan: Plan | None = None
    drafter: str | None = None


def drafting_of(asked: Speculation | None, drafters: Mapping[str, Drafter], settings: Settings) -> Drafting:
    """Return the plan and the drafter that a request asks for.

    Raises:
        ApiError: 400 for a plan or a drafter that does not exist here, or for contradictory fields.
    """
    if asked is None:
        return Drafting()
    if not asked.enabled:
        if asked.plan is not None or asked.drafter is not None:
            raise bad("speculation is switched off, but names a plan or a drafter; leave them out.", FIELD)
        return Drafting(NO_DRAFT)
    if asked.plan is None and asked.drafter is None:
        return Drafting()
    name = asked.drafter if asked.drafter is not None else next(iter(drafters), None)
    if name is None or name not in drafters:
        if not drafters:
            raise bad("nothing drafts here, so no request can ask for a draft; leave plan and drafter out.", FIELD)
        raise bad(f"there is no drafter {asked.drafter!r} here; there is {', '.join(drafters)}.", FIELD)
    drafter = drafters[name]
    plan = drafter.default_plan() if asked.plan is None else read_plan(asked.plan, settings)
    deepest = drafter.max_depth
    if deepest is not None and plan.depth > deepest:
        raise bad(f"the plan {asked.plan!r} is {plan.depth} deep, but {name} reaches {deepest}.", FIELD)
    return Drafting(plan, name)


def read_plan(words: str, settings: Settings) -> Plan:
    """Read "4,2,1" (children of every node, depth by depth), "chain 3", "none", or the name of a published tree."""
    published = published_trees()
    text = words.strip()
    if text == "none":
        return NO_DRAFT
    if text in published:
        return Plan(choices=published[text])
    chain = re.fullmatch(r"chain ([0-9]{1,3})", text)
    tree = re.fullmatch(r"[0-9]{1,3}( ?, ?[0-9]{1,3}){0,63}", text)
    if chain is None and tree is None:
        raise bad(
            f"the plan {words[:40]!r} is not understood; give children depth by depth such as 4,2,1, a chain such as "
            f"chain 3, none, or a published tree ({', '.join(sorted(published))}).", FIELD,
        )
    branching = (1,) * int(chain[1]) if chain is not None else tuple(int(part) for part in text.split(","))
    if max(branching, default=0) > settings.max_branching:
        raise bad(f"the plan {words[:40]!r} guesses more than {settings.max_branching} tokens after one.", FIELD)
    try:
        plan = Plan(branching)
    except DraftsmithError as error:
        raise bad(str(error), FIELD) from error
    if plan.max_nodes >= DRAFT_ROOM:
        raise bad(f"the plan {words[:40]!r} has {plan.max_nodes} guesses; the most is {DRAFT_ROOM - 1}.", FIELD)
    return plan
