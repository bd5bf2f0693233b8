"""Train the demo target: a 15.7 M parameter Llama on Python source, prose, documentation and dialogue.

    python recipes/demo_target.py --data DATA --init WARM_START --out runs/demo-target --minutes 70

Muon moves the matrices and AdamW the rest; the learning rate is flat to half of the run and then falls
linearly to 2 %. The run is measured in minutes so that it ends when it was promised to, on any machine.
One document in fifty, chosen by the hash of its text, is never seen (`draftsmith.training.data.split`).
Shapes: B batch, T positions.
"""

import argparse
import json
import lzma
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.training.data.split import is_held_out

MIX = {"code": 0.55, "prose": 0.25, "docs": 0.12, "dialogue": 0.08}
POOL_WINDOWS = 4096


def document_text(record: dict) -> str:
    """Return the plain text of a record: its `text`, or its `messages` in the tokenizer's own turn markers."""
    if "text" in record:
        return record["text"]
    return "\n".join(f"<|{turn['role']}|>{turn['content']}" for turn in record["messages"])


def load_documents(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Read every corpus as (training, held-out) documents."""
    corpora = {}
    for name in MIX:
        training, held_out = [], []
        with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                text = document_text(json.loads(line))
                (held_out if is_held_out(text) else training).append(text)
        corpora[name] = (training, held_out)
    return corpora


def windows(documents: dict[str, list[str]], tokenizer, length: int, seed: int) -> Iterator[list[int]]:
    """Yield shuffled windows of `length` + 1 tokens, packed over documents with the end token between them."""
    rng = random.Random(seed)
    order = {name: rng.sample(range(len(texts)), len(texts)) for name, texts in documents.items()}
    drawn = dict.fromkeys(MIX, 0)
    seen_tokens = dict.fromkeys(MIX, 0)
    buffers: dict[str, list[int]] = {name: [] for name in MIX}
    pool: list[list[int]] = []
    while True:
        name = min(MIX, key=lambda n: seen_tokens[n] / MIX[n])
        text = documents[name][order[name][drawn[name] % len(order[name])]]
        drawn[name] += 1
        ids = tokenizer(text[:60_000], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        seen_tokens[name] += len(ids)
        buffer = buffers[name]
        buffer += ids
        while len(buffer) > length:
            pool.append(buffer[: length + 1])
            del buffer[:length]
        while len(pool) > POOL_WINDOWS:
            yield pool.pop(rng.randrange(len(pool)))


def build_optimizers(model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Give the hidden matrices to Muon and everything else (embeddings, norms) to AdamW."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokenizer, texts: list[str], length: int, count: int = 24) -> float:
    """Mean cross-entropy in nats a token over the first window of the first `count` long held-out documents."""
    losses = []
    for text in texts:
        ids = tokenizer(text[: length * 8], add_special_tokens=False)["input_ids"][: length + 1]
        if len(ids) <= length:
            continue
        tokens_T = torch.tensor(ids)
        logits_TV = model(tokens_T[None, :-1]).logits[0].float()
        losses.append(F.cross_entropy(logits_TV, tokens_T[1:]).item())
        if len(losses) == count:
            break
    return sum(losses) / max(1, len(losses))


def save(model: torch.nn.Module, tokenizer, out: Path) -> None:
    """Write the model in bf16, in shards small enough for a repository."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out, state_dict=state, max_shard_size="14MB")
    tokenizer.save_pretrained(out)


def main() -> None:
    """Train by the clock, logging and saving on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with {code,prose,docs,dialogue}.jsonl.xz")
    parser.add_argument("--init", required=True, help="warm start: a model folder with its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=70.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.init)
    model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    corpora = load_documents(args.data)
    batches = windows({name: pair[0] for name, pair in corpora.items()}, tokenizer, args.length, args.seed)
    optimizers = build_optimizers(model, args.rate)

    @torch.compile
    def loss_of(inputs_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = model(inputs_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())

    def evaluate(step: int) -> None:
        model.eval()
        scores = {name: held_out_loss(model, tokenizer, pair[1], args.length) for name, pair in corpora.items()}
        model.train()
        log({"step": step, "held_out": {name: round(score, 4) for name, score in scores.items()}})

    def log(record: dict) -> None:
        print(json.dumps(record), flush=True)
        with (args.out / "train-log.jsonl").open("a") as handle:
            handle.write(json.dumps(record) + "\n")

    (args.out / "train-log.jsonl").unlink(missing_ok=True)
    evaluate(0)
    model.train()
    begun, last_saved, step, recent = time.monotonic(), time.monotonic(), 0, []
    while (done := (time.monotonic() - begun) / (60 * args.minutes)) < 1:
        rate = args.rate * min(1.0, (step + 1) / 30) * (1.0 if done < 0.5 else 1 - 0.98 * (done - 0.5) / 0.5)
        tokens_BT = torch.tensor([next(batches) for _ in range(args.batch)])
        loss = loss_of(tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        recent.append(loss.item())
        if step % 20 == 0:
            speed = step * args.batch * args.length / (time.monotonic() - begun)
            log({"step": step, "tokens": step * args.batch * args.length, "loss": round(sum(recent) / len(recent), 4),
                 "rate": round(rate, 6), "tokens_per_s": round(speed)})
            recent = []
        if time.monotonic() - last_saved > 600:
            save(model, tokenizer, args.out)
            last_saved = time.monotonic()
    evaluate(step)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
