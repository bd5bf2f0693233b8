"""Acceptance in training against acceptance in serving, over tokenizers and chat templates, on texts and conversations.

    python benchmarks/parity.py

For every kind of tokenizer a small target is made and taught the embedded texts, and conversations cut from them, as
training reads them; then a drafter is trained for it in both stages. What follows is counted on held-out texts and
conversations, which serving gets as text and as messages:

- in training: prompts and continuations as stage 2 makes them, side by side in padded batches, guesses by the training
  forward; from the first token that the target wrote, every step goes on behind the guesses that are right;
- in serving: the engine decodes with chains of guesses.

Both count the same continuations, the target's own greedy ones, so the two differ only where something is wrong, or
where rounding decides between two guesses. `draftsmith check` says the same of the saved drafter. Then the target's
tokenizer is changed behind the drafter's back, one thing at a time, and `check` has to say so.

What the JSON file has of kinds that are not asked for (`--kinds`) stays there. The exit code is 1 if a gap is above 0.5
points, or a change is not found.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import arguments, finish, main, print_table, say, start
from parity_tokenizers import BEGIN, KINDS, UNKNOWN, opened, wrapped
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import draftsmith
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.targets.records import Completion, Document, read_record
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.build import build_loader
from draftsmith.training.data.batches import draw, prepare
from draftsmith.training.data.loader import Windowing
from draftsmith.training.data.reader import Reader
from draftsmith.training.data.sources import Piece
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.sections import DistillationSection
from draftsmith.types import SamplingParams, Statistics, require_finished

MOST_POINTS = 0.5
NEW_TOKENS = 48
ROWS = 8


# Data, target and drafter


def conversation_of(text: str) -> dict[str, Any]:
    """Make a conversation of two turns out of a text."""
    lines = [" ".join(line.split())[:120] for line in text.split("\n") if len(line.split()) > 2][:4]
    turns = ("user", "assistant") * 2
    messages = [{"role": role, "content": line} for role, line in zip(turns, lines, strict=False)]
    return {"messages": [{"role": "system", "content": "Go on with the text."}, *messages]}


def recipe_of(data: Path, folder: Path, steps: int, seed: int) -> Recipe:
    """Return the run that trains a drafter for a small target."""
    rates = {"rate": 5e-3, "final_rate": 2e-4, "batch": 8}
    return build_recipe({
        "drafter": {"family": "mlp", "n_predict": 3, "inner_dim": 96},
        "data": {"sources": [{"path": str(data)}], "held_out_every": 0},
        "stage1": {"steps": steps, "length": 96, **rates},
        "stage2": {"steps": steps, "prompt_tokens": 12, "longest_prompt": 120, "new_tokens": NEW_TOKENS, "epochs": 4,
                   "temperature": 0, "generate_batch": 32, **rates},
        "optimizer": {"precision": "fp32"},
        "output": {"folder": str(folder), "dtype": "fp32", "save_every": steps},
        "seed": seed,
    })


def taught_target(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, steps: int, name: str) -> Target:
    """Make a small Llama and teach it the windows that training reads of the data."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    ))
    loader = build_loader(recipe, Target(model.eval(), tokenizer, name, native=False), Windowing(96), "target")
    optimizer = torch.optim.AdamW(model.train().requires_grad_(True).parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = loader.next_batch(16)
        labels_BL = batch.tokens_BL.masked_fill(~batch.learnt_BL, -100)
        loss = model(batch.tokens_BL, labels=labels_BL, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    say(f"{name}: the target's loss is {loss.item():.2f}")
    return Target(model.eval().requires_grad_(False), tokenizer, name, native=False)


# Counting


def to_learn(asked: Document) -> Document:
    """Return a document whose end is to be learnt behind what is asked, so that it is the prompt in training."""
    if isinstance(asked, str):
        return Completion(asked, "…")
    assert isinstance(asked, Conversation)
    return replace(asked, messages=[*asked.messages, {"role": "assistant", "content": "…"}])


def in_training(target: Target, drafter: TrainableDrafter, documents: list[Document]) -> Statistics:
    """Count on prompts and continuations as stage 2 makes them, guesses by the training forward."""
    reader, depth, total = Reader.of(target, "assistant"), drafter.max_depth, Statistics()
    prompts = [reader.prompt(Piece(to_learn(document)), 2, 10_000, lambda _: -1) for document in documents]
    engine = Engine(target, max_batch=ROWS, max_length=max(map(len, prompts)) + NEW_TOKENS)
    written = require_finished(engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS)))
    windows = [
        Window(prompt + done.tokens, [(len(prompt), len(prompt) + len(done.tokens))])
        for prompt, done in zip(prompts, written, strict=True)
    ]
    for first in range(0, len(windows), ROWS):
        rows = windows[first : first + ROWS]
        task = draw(collate(rows, 10_000, depth - 1), depth, None, ())
        examples = prepare(drafter, target, task, distillation=DistillationSection(), seed=())
        with torch.no_grad():
            guesses = [logits_BTV.argmax(-1) for logits_BTV in drafter(examples.tokens_BT, examples.features_BTF)]
        for row, window in enumerate(rows):
            # Position t is the root that is the window's token t + 1; guess d behind it is token t + d + 2.
            right = [
                [t + d + 2 < len(window.tokens) and int(guesses[d][row, t]) == window.tokens[t + d + 2]
                 for d in range(depth)]
                for t in range(len(window.tokens) - 1)
            ]
            total += walked(right, window.spans[0][0], len(window.tokens))
    return total


def walked(right: list[list[bool]], begin: int, end: int) -> Statistics:
    """Go through a text as decoding does, from its first written token on: what is right stays, and one token more."""
    found, root = Statistics(accepted_by_depth=[0] * len(right[0])), begin
    while root < end - 1:
        # The last token of a text counts as the target's own.
        hits = (*right[root - 1], False).index(False)
        accepted = min(hits, end - root - 2)
        for d in range(accepted):
            found.accepted_by_depth[d] += 1
        found.steps, found.accepted = found.steps + 1, found.accepted + accepted
        root += accepted + 1
    return found


def in_serving(target: Target, drafter: TrainableDrafter, documents: list[Document]) -> Statistics:
    """Count what the engine accepts behind the same prompts, as texts and as messages."""
    prompts = [document if isinstance(document, str) else list(document.messages) for document in documents]
    engine = Engine(target, drafter, plan=Plan((1,) * drafter.max_depth), max_batch=ROWS)
    total = Statistics()
    for done in require_finished(engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))):
        total += done.statistics
    return total


def shares(statistics: Statistics, depth: int) -> list[float]:
    """Return the share of steps that accepted at least so many guesses, by depth."""
    counts = (statistics.accepted_by_depth + [0] * depth)[:depth]
    return [count / max(1, statistics.steps) for count in counts]


def largest_gap(one: list[float], other: list[float]) -> float:
    """Return by how many points acceptance differs where it differs most."""
    return 100 * max(abs(a - b) for a, b in zip(one, other, strict=True))


# Mismatches


def without_opening(folder: Path) -> None:
    """Leave out what stands before a text, or put a token there where nothing stood."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = json.loads(tokenizer.to_str())
    if whole["post_processor"] and whole["post_processor"]["type"] == "TemplateProcessing":
        whole["post_processor"] = None
        tokenizer = Tokenizer.from_str(json.dumps(whole))
    else:
        tokenizer = opened(tokenizer, f"{BEGIN} $A")
    tokenizer.save(str(folder / "tokenizer.json"))


def another_template(folder: Path) -> None:
    """Write conversations otherwise."""
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("[assistant] ", "[assistant]: "))


def another_bos(folder: Path) -> None:
    """Give the template, which stays, another token to begin conversations with."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": UNKNOWN}))


MISMATCHES: dict[str, Callable[[Path], None]] = {
    "BOS": without_opening, "template": another_template, "template's BOS": another_bos,
}


def mismatches(target_folder: Path, drafter: Path, scratch: Path, prompts: Path) -> dict[str, str]:
    """Change the target's tokenizer, one thing at a time; return what `check` finds, by what was changed."""
    found = {}
    for name, change in MISMATCHES.items():
        folder = scratch / name.replace(" ", "-")
        shutil.copytree(target_folder, folder)
        change(folder)
        report = draftsmith.check(
            drafter, folder, dtype="fp32", serving_dtype="fp32", prompts=prompts, prompt_count=3, new_tokens=8
        ).report
        found[name] = "; ".join(check.detail for check in report.checks if check.passed is False)
    return found


# The benchmark


def measured(name: str, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train a target and a drafter for one kind of tokenizer, and measure."""
    build, template = KINDS[name]
    texts = [prompt.text for prompt in embedded_prompts(split="train")]
    records: list[dict[str, Any]] = [{"text": text[:1500]} for text in texts]
    records += [conversation_of(text) for text in texts if len(conversation_of(text)["messages"]) == 5]
    data = scratch / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = wrapped(build([text[:1500] for text in texts]), template)
    recipe = recipe_of(data, scratch / "run", args.steps, args.seed)
    target = taught_target(tokenizer, recipe, args.target_steps, name)
    drafter_folder = draftsmith.train(recipe, target=target).drafter
    drafter = load_drafter(drafter_folder, target)

    held_out = [prompt.text for prompt in embedded_prompts()]
    asked: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": text[:150]} for text in held_out[: args.prompts]],
        "conversations": [
            {"messages": chat["messages"][:-1]} for text in held_out
            if len((chat := conversation_of(text))["messages"]) == 5
        ][: args.prompts],
    }
    result: dict[str, Any] = {"opening": list(target.facts().opening or ()), "kinds": {}}
    for what, some in asked.items():
        documents = [read_record(record, what) for record in some]
        learnt, served = in_training(target, drafter, documents), in_serving(target, drafter, documents)
        trained_D, served_D = (shares(one, drafter.max_depth) for one in (learnt, served))
        result["kinds"][what] = {
            "prompts": len(some), "steps": [learnt.steps, served.steps],
            "tau": served.tokens_per_step, "in_training": trained_D, "in_serving": served_D,
            "gap_points": largest_gap(trained_D, served_D),
        }
    path = scratch / "asked.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for some in asked.values() for record in some[:12]))
    saved = scratch / "target"
    target.model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    report = draftsmith.check(
        drafter_folder, saved, dtype="fp32", serving_dtype="fp32", prompts=path, prompt_count=24, new_tokens=NEW_TOKENS
    ).report
    assert report.parity is not None
    result["check"] = {
        "passed": report.passed, "sentence": report.sentence(), "steps": report.parity.roots,
        "gap_points": largest_gap(report.parity.predicted, report.parity.measured),
    }
    result["mismatches"] = mismatches(saved, drafter_folder, scratch, path)
    return result


def holds(result: dict[str, Any]) -> bool:
    """Tell whether every gap is small, `check` passes, and finds every mismatch."""
    gaps = [found["gap_points"] for found in (*result["kinds"].values(), result["check"])]
    return max(gaps) <= MOST_POINTS and result["check"]["passed"] and all(result["mismatches"].values())


def run() -> None:
    """Measure every kind."""
    parser = arguments(__doc__, "parity", dtype="fp32")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--target-steps", type=int, default=600, help="of teaching the target")
    parser.add_argument("--steps", type=int, default=200, help="of training the drafter, in each stage")
    parser.add_argument("--prompts", type=int, default=60, help="texts, and as many conversations")
    args = start(parser)
    kept = json.loads(args.json.read_text())["results"] if args.json.exists() else {}
    for name in args.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            kept[name] = measured(name, Path(scratch), args)
        say(f"{name}: {'holds' if holds(kept[name]) else 'DOES NOT HOLD'}")
        finish(args, {"results": {name: kept[name] for name in KINDS if name in kept}})
    tell({name: kept[name] for name in KINDS if name in kept})
    if not all(map(holds, kept.values())):
        raise SystemExit(1)


def tell(results: dict[str, dict[str, Any]]) -> None:
    """Print the gaps, and what `check` finds of mismatches."""
    rows = []
    for name, result in results.items():
        for what, found in result["kinds"].items():
            rows.append([
                name, what, f"{found['tau']:.2f}", str(found["steps"][1]), *(
                    " ".join(f"{100 * share:.1f}" for share in found[side]) for side in ("in_training", "in_serving")
                ), f"{found['gap_points']:.2f}",
            ])
        rows.append([name, "`check`, both", "", str(result["check"]["steps"]), "", "",
                     f"{result['check']['gap_points']:.2f}"])
    print_table(
        "Acceptance by depth, in per cent of the steps",
        ["tokenizer", "prompts", "τ", "steps", "in training", "in serving", "gap, points"], rows,
    )
    print_table(
        "Changes of the target's tokenizer that `check` finds", ["tokenizer", *MISMATCHES],
        [[name, *("found" if result["mismatches"][what] else "NOT FOUND" for what in MISMATCHES)]
         for name, result in results.items()],
    )


if __name__ == "__main__":
    main(run)
