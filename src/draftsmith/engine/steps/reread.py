"""Reads a row whose root has no finite logits again, without guesses.

A guessed token may have no finite state although the row's own text has one. Attention multiplies masked entries too
(0 × NaN = NaN), so one such node spoils the whole tree. Plain decoding would not have read it.

Shapes: B rows, T context tokens, F feature width, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from draftsmith.engine.policy import Choice
from draftsmith.engine.steps.allowed import constrain
from draftsmith.engine.steps.commit import commit, keep_states
from draftsmith.engine.steps.layout import lay_out
from draftsmith.engine.steps.rows import Penalties, Rows, make_rows, pick
from draftsmith.engine.steps.step import Stepper
from draftsmith.plan import NO_DRAFT
from draftsmith.types import Context, empty_draft
from draftsmith.verify import accept_greedy


def reread(
    stepper: Stepper, rows: Rows, before: Context, row: int, penalties: Penalties
) -> tuple[list[int], Tensor]:
    """Take back what a step did to one row, and let it go on by one token of the target's own.

    Args:
        rows: after the step; its context and history are corrected for this row.
        before: the context that the step began with.

    Returns:
        the row's line of the table of `StepResult`, which has `NOT_FINITE` if no guess was to blame, and the target's
        logits (1, V).
    """
    target, cache, request = stepper.target, stepper.cache, rows.requests[row]
    penalties.restore(request)
    context = pick(before, [row])
    one = make_rows([request], context, Choice(NO_DRAFT), target.vocab_size, penalties)
    draft = empty_draft(context)
    layout = lay_out(context, draft)
    if one.constrained is not None:
        layout = constrain(layout, one.constrained, context, lay_out)
    logits_BMV, features_BMF = target.read_chain(
        cache, layout.tokens_BM, context.lengths_B - 1, stepper.taps, context.slots_B
    )
    if cache.states_NEF is not None:
        keep_states(cache, context, features_BMF)
    if one.simple:
        acceptance = accept_greedy(logits_BMV.argmax(dim=-1), draft)
    else:
        acceptance = stepper.choose(one, context, logits_BMV, layout)
    after, table_BX, _ = commit(cache, acceptance, logits_BMV, features_BMF, layout, context)
    rows.context = replace(
        rows.context,
        tokens_BT=spliced(rows.context.tokens_BT, row, after.tokens_BT),
        features_BTF=spliced(rows.context.features_BTF, row, after.features_BTF),
        counts_B=spliced(rows.context.counts_B, row, after.counts_B),
        lengths_B=spliced(rows.context.lengths_B, row, after.lengths_B),
    )
    if one.history is not None:
        one.history.commit(after.tokens_BT, after.counts_B)
    line: list[int] = table_BX[0].tolist()
    return line, logits_BMV[0]


def spliced(all_BT: Tensor, row: int, one_1T: Tensor) -> Tensor:
    """Return a copy in which one row is replaced by that of another tensor, filled up with zeros."""
    copy_BT = all_BT.clone()
    copy_BT[row] = 0
    if all_BT.ndim == 1:
        copy_BT[row] = one_1T[0]
    else:
        copy_BT[row, : one_1T.shape[1]] = one_1T[0]
    return copy_BT
