"""Drafting agrees with training over the life of rows: what `propose` drafts is what `forward` predicts, everywhere."""

from dataclasses import replace

import torch

from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context
from draftsmith.verify import Stream, race


@torch.no_grad()
def check_agreement_over_time(drafter: TrainableDrafter, target: Target) -> None:
    """Assert that drafts are what `forward` predicts, fed the same text, the target's states and the drafted tokens.

    Rows of different lengths advance by different numbers of tokens, leave and join, beside padding rows, and one step
    drafts nothing. Every node of every tree is compared: greedy tokens exactly, distributions to fp32. `drafter` is in
    float64 and bound.
    """
    generator = torch.Generator().manual_seed(5)
    texts_RL = torch.randint(0, target.vocab_size, (6, 60), generator=generator)
    states_RLF, _ = target.encode(texts_RL, drafter.taps)
    drafter.attach(target.new_cache(5, 100), Plan((1,) * drafter.max_depth))
    # Each stage: rows in batch order; -1 is padding. Rows take free slots and keep them.
    stages = [[0], [0, 1, 2], [0, 1, 2], [2, 1], [2, 1, 3, -1], [2, 1, 3, -1], [3, 1, 4, 5], [5], [5]]
    lengths = {row: int(torch.randint(2, 20, (), generator=generator)) for row in range(6)}
    known: dict[int, int] = {}
    slot_of: dict[int, int] = {}
    for number, rows in enumerate(stages):
        drafter.reset_rows([row for row in known if row not in rows])
        for row in rows:
            if row in known:
                lengths[row] += int(torch.randint(1, drafter.max_depth + 2, (), generator=generator))
        slot_of = {row: slot for row, slot in slot_of.items() if row in rows and row >= 0}
        for row in rows:
            if row not in slot_of:
                slot_of[row] = next(slot for slot in (3, 0, 4, 1, 2) if slot not in slot_of.values())
        counts = [1 if row < 0 else lengths[row] - known.get(row, 1) for row in rows]
        if not drafter.reads_prompt:
            counts = [min(count, drafter.max_depth + 1) for count in counts]
        known = {row: lengths[row] for row in rows if row >= 0}
        width = max(counts) + number % 3
        tokens_BT = torch.randint(0, target.vocab_size, (len(rows), width), generator=generator)
        features_BTF = torch.randn((len(rows), width, states_RLF.shape[2]), generator=generator, dtype=target.dtype)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row >= 0:
                tokens_BT[b, :count] = texts_RL[row, lengths[row] - count : lengths[row]]
                features_BTF[b, :count] = states_RLF[row, lengths[row] - count - 1 : lengths[row] - 1]
        context = Context(
            tokens_BT, features_BTF, torch.tensor(counts),
            torch.tensor([lengths.get(row, 1000) for row in rows]), torch.tensor(rows),
            torch.ones(len(rows)), torch.arange(len(rows)), slots_B=torch.tensor([slot_of[row] for row in rows]),
        )
        if number == 1:
            drafter.follow(context)
            continue
        greedy = replace(context, temperature_B=torch.zeros(len(rows)))
        chain = drafter.propose(greedy, Plan((1,) * drafter.max_depth))
        sampled = shared = None
        if drafter.can_sample:
            shared = drafter.propose(context, Plan((1,) * drafter.max_depth))
            assert shared.q_BMV is None
            # The same tokens again, as an engine that starts the step anew would hand them over.
            sampled = drafter.propose(context, Plan((2, 2, 1)[: drafter.max_depth], sampled=True))
        for b, row in enumerate(rows):
            if row < 0:
                continue
            text, states = texts_RL[row, : lengths[row]], states_RLF[row, : lengths[row] - 1]
            logits = _forward_behind(drafter, text, states, chain.tokens_BN[b].tolist())
            assert [int(one.argmax()) for one in logits] == chain.tokens_BN[b].tolist(), (number, row)
            if sampled is None or shared is None:
                continue
            logits = _forward_behind(drafter, text, states, shared.tokens_BN[b].tolist())
            drawn = [
                race(one.softmax(-1).flatten(), context.seeds_B[b], context.lengths_B[b] + depth, Stream.TARGET).item()
                for depth, one in enumerate(logits)
            ]
            assert drawn == shared.tokens_BN[b].tolist(), "a sampled row guesses by the target's own noise"
            for node in range(-1, sampled.tokens_BN.shape[1]):
                path, up = [], node
                while up >= 0:
                    path.append(int(sampled.tokens_BN[b, up]))
                    up = int(sampled.parents_BN[b, up])
                if len(path) < len(sampled.branching):
                    guess = _forward_behind(drafter, text, states, [*path[::-1], 0])[-1]
                    q_V = sampled.q_BMV[b, node + 1]
                    torch.testing.assert_close(q_V, guess.softmax(-1).to(q_V), rtol=1e-4, atol=1e-7)


def _forward_behind(
    drafter: TrainableDrafter, text: torch.Tensor, states: torch.Tensor, guesses: list[int]
) -> list[torch.Tensor]:
    """Return the logits of every depth behind the root of a text: depth d has read guesses[:d]."""
    tokens_T = torch.cat([text[1:], torch.tensor(guesses)])
    # What comes after the root must not be looked at.
    features_TF = torch.cat([states, torch.full((len(guesses), states.shape[1]), 1e6, dtype=states.dtype)])
    root = len(text) - 2
    depths = drafter(tokens_T.unsqueeze(0), features_TF.unsqueeze(0))
    return [logits[0, root] for logits in depths[: len(guesses)]]
