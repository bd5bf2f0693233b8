"""Writes a target that costs what a larger one costs and says what the embedded one says, and its speculator.

    python benchmarks/padded.py --size 0.5b --out /tmp/padded-0.5b
    python benchmarks/quantised_self.py --target /tmp/padded-0.5b
    draftsmith bench --target /tmp/padded-0.5b --drafter /tmp/padded-0.5b/speculator --task code

The embedded target stays in the cache of a processor, and random weights accept nothing that was trained. Padded with
what meets zeros (`draftsmith.evaluation.padding`) it has to be read from memory, and a draft is accepted as often as
with the embedded target. What is printed says how exactly the two agree: logits and states of held-out prompts, greedy
text, and tokens a step of the speculator.
"""

from pathlib import Path
from typing import Any

import torch
from common import arguments, finish, main, make_prompts, say, show_table, start

from draftsmith import assets
from draftsmith.drafters.heads.mlp_padding import pad_speculator
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import TimedCall, run_engine
from draftsmith.evaluation.padding import HALF_BILLION, Padding, pad_target
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target

# As wide and deep as models of these sizes are; the vocabulary stays the embedded one, of 8,192 tokens.
SIZES = {"0.1b": Padding(4, 1024, 9), "0.5b": HALF_BILLION, "1.5b": Padding(4, 8960, 31)}
BATCH = 8
SPECULATOR = "speculator"
"""The folder of the padded speculator, inside that of the target."""


def padded() -> None:
    """Write the folders and compare."""
    parser = arguments(__doc__, "padded")
    parser.add_argument("--size", choices=list(SIZES), default="0.5b")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, which must not be there yet")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts a task to compare on")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = start(parser)
    source, drafter = Path(args.target or assets.demo_target()), Path(args.drafter or assets.demo_drafter())
    padding = SIZES[args.size]
    weights = pad_target(source, args.out, padding)
    pad_speculator(drafter, args.out / SPECULATOR, padding.times)
    say(f"{args.out}: {weights / 1e6:,.0f} million weights, {2 * weights / 1e9:.2f} GB in bf16")
    small, large = Target.from_pretrained(source, dtype=args.dtype), Target.from_pretrained(args.out, dtype=args.dtype)
    found = [compare(small, large, drafter, args.out / SPECULATOR, task, args) for task in ("code", "prose")]
    header = ["", "code", "prose"]
    shown = {
        "logits with the same bits": [f"{one['same_logits']:.6f}" for one in found],
        "largest difference of logits": [f"{one['largest_difference']:.4f}" for one in found],
        "states with the same bits": [f"{one['same_states']:.6f}" for one in found],
        "greedy texts that are the same": [f"{one['same_texts']} of {one['texts']}" for one in found],
        "drafted texts that are the plain ones": [f"{one['same_drafted']} of {one['texts']}" for one in found],
        "tokens a step, embedded": [f"{one['tau']:.3f}" for one in found],
        "tokens a step, padded": [f"{one['padded_tau']:.3f}" for one in found],
    }
    show_table(f"{args.size}: the padded target against {small.name}", header, [[k, *v] for k, v in shown.items()])
    finish(args, {"weights": weights, "size": args.size, "tasks": dict(zip(("code", "prose"), found, strict=True))})


def compare(
    small: Target, large: Target, drafter: Path, padded_drafter: Path, task: str, args: Any
) -> dict[str, float]:
    """Return how far logits, states, texts and acceptance of the two agree."""
    prompts = make_prompts(small, task, 64, args.prompts, args.seed)
    tokens_BT = torch.tensor(prompts)
    (states_BTF, logits_BTV), (wide_BTF, others_BTV) = (one.encode(tokens_BT, logits=True) for one in (small, large))
    assert logits_BTV is not None and others_BTV is not None
    narrow_BTF, padding_BTF = wide_BTF.split([small.hidden_size, large.hidden_size - small.hidden_size], dim=-1)
    assert not padding_BTF.any(), "the padding of a state is not zero"
    runs = {
        (target is large, guesses): decode(target, folder, guesses, prompts, args)
        for target, folder in ((small, drafter), (large, padded_drafter)) for guesses in (0, 4)
    }
    plain, drafted = runs[True, 0], runs[True, 4]
    tau, padded_tau = (one.measurement.tokens_per_step for one in (runs[False, 4], drafted) if one.measurement)
    return {
        "same_logits": float((logits_BTV == others_BTV).double().mean()),
        "largest_difference": float((logits_BTV.float() - others_BTV.float()).abs().max()),
        "same_states": float((states_BTF == narrow_BTF).double().mean()),
        "texts": len(prompts),
        "same_texts": sum(a == b for a, b in zip(plain.tokens, runs[False, 0].tokens, strict=True)),
        "same_drafted": sum(a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)),
        "tau": tau,
        "padded_tau": padded_tau,
    }


def decode(target: Target, drafter: Path, guesses: int, prompts: list[list[int]], args: Any) -> TimedCall:
    """Decode all prompts greedily, a chain of so many guesses at a time."""
    engine = Engine(target, load_drafter(drafter, target), max_batch=BATCH, max_length=64 + args.new_tokens)
    return run_engine(engine, prompts, Plan((1,) * guesses) if guesses else NO_DRAFT, args.new_tokens)


if __name__ == "__main__":
    main(padded)
