"""Trees, noise, distributions and acceptance: pure functions of tensors."""

from draftsmith.verify.accept import Acceptance, accept_deterministic, accept_greedy, accept_sampled
from draftsmith.verify.block import accept_block
from draftsmith.verify.choices import (
    accept_block_as_defined,
    accept_block_natively,
    accept_defined,
    accept_drawn_as_defined,
    accept_drawn_natively,
    accept_natively,
    can_accept_natively,
)
from draftsmith.verify.distribution import History, SamplingBatch, probabilities, shape_logits
from draftsmith.verify.narrow import Narrowed, narrow
from draftsmith.verify.noise import Stream, arrivals, categorical, race, uniform
from draftsmith.verify.tree import ancestor_table, tree_tables
from draftsmith.verify.typical import accept_typical

__all__ = [
    "Acceptance",
    "History",
    "Narrowed",
    "SamplingBatch",
    "Stream",
    "accept_block",
    "accept_block_as_defined",
    "accept_block_natively",
    "accept_defined",
    "accept_deterministic",
    "accept_drawn_as_defined",
    "accept_drawn_natively",
    "accept_greedy",
    "accept_natively",
    "accept_sampled",
    "accept_typical",
    "ancestor_table",
    "arrivals",
    "can_accept_natively",
    "categorical",
    "narrow",
    "probabilities",
    "race",
    "shape_logits",
    "tree_tables",
    "uniform",
]
