"""How reports name a plan: the same in all of them."""

from draftsmith.plan import Plan


def plan_name(plan: Plan) -> str:
    """Name a plan in a few characters: its shape, its limits, and what is not the default."""
    if not plan.branching:
        return "none"
    widths = set(plan.branching)
    if plan.choices:
        shape = f"static tree of {len(plan.choices)} nodes"
    elif widths == {1}:
        shape = f"chain {plan.depth}"
    elif len(widths) == 1 and plan.depth > 2:
        shape = f"tree {widths.pop()}^{plan.depth}"
    else:
        shape = "tree " + ",".join(map(str, plan.branching))
    limits = (("paths", plan.paths), ("nodes", plan.nodes), ("beam", plan.beam))
    return " ".join([
        shape,
        *(f"{name} {value}" for name, value in limits if value is not None),
        *(["sampled"] if plan.sampled else []),
        *([f"factor {plan.factor:g}"] if plan.factor is not None else []),
        *([f"confidence {plan.confidence:g}"] if plan.confidence is not None else []),
        *([plan.acceptance] if plan.acceptance != "exact" else []),
    ])
