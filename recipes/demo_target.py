"""Train the demo target, a 15.7 M parameter Llama, for as long as one likes, in as many sittings as one likes.

    python recipes/demo_data.py --data DATA --tokenizer WARM_START --out runs/demo-data
    python recipes/demo_target.py --data runs/demo-data --init WARM_START --out runs/demo-target
    python recipes/demo_target.py --out runs/demo-target
    python recipes/demo_target.py --out runs/demo-target --cool 4000000 --leave-loops 0.5

The second command begins, the third goes on, to the bit where the last checkpoint was (same machine, same number of
threads), after a kill of any kind. Until it is ended (Ctrl-C, or SIGTERM, or --steps) it trains at a flat rate after
a short warm-up. The last command takes the latest checkpoint aside and lets its rate fall to nothing over so many
tokens; the result is runs/demo-target/cooled/latest, and the flat run can go on afterwards.

Muon moves the matrices and AdamW the rest. `--leave-loops 0.5` adds so many times the loss by which the model learns to
leave loops as the warm start would (`demo_loops.py`), on texts that it writes itself every `--own-every` steps and
after every checkpoint. Every checkpoint is a model folder in float32 with the optimizer beside it; metrics.jsonl has
loss, speed and the held-out loss of each source. `--export FOLDER` writes the latest checkpoint of --out in bf16.
Shapes: B batch, T positions.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_attention import register
from demo_loops import OwnTexts, leaving
from demo_stream import Stream, held_out_windows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.drafters.trainable import storage
from draftsmith.files import JsonLines
from draftsmith.training.checkpoint import LATEST, Checkpoint, Checkpoints, load_optimizer_tensors, optimizer_tensors
from draftsmith.types import DraftsmithError

SHARES = {"code": 0.38, "prose": 0.28, "dialogue": 0.17, "problems": 0.05, "docs": 0.08, "renames": 0.04}
WARMUP_STEPS = 100
HELD_OUT_WINDOWS = 24
KEPT_CHECKPOINTS = 2
SETTINGS = "settings.json"


def rate_at(step: int, peak: float, begun: int, cooling_steps: int) -> float:
    """Return the rate of a step: a linear rise, then flat; or, of a run that cools from `begun` on, a linear fall."""
    if cooling_steps:
        return peak * max(0.0, 1 - (step - begun) / cooling_steps)
    return peak * min(1.0, (step + 1) / WARMUP_STEPS)


def build_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Give the hidden matrices to Muon and everything else (embeddings, norms) to AdamW; each step sets the rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


class Trainer:
    """One run: the model, its optimizers, its data, and the step it has reached."""

    def __init__(self, out: Path, settings: dict[str, Any], found: Checkpoint | None) -> None:
        self.out, self.settings = out, settings
        folder = found.folder if found else Path(settings["init"])
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=register()
        ).train()
        self.optimizers = build_optimizers(self.model)
        self.checkpoints = Checkpoints(out, keep=KEPT_CHECKPOINTS)
        self.step = 0
        if found:
            self.step = found.progress["step"]
            load_optimizer_tensors(self.optimizers, found.optimizer)
        data = Path(settings["data"])
        self.stream = Stream(data, settings["shares"], settings["length"], settings["batch"], settings["seed"])
        self.stream.skip(self.step)
        self.held_out = {
            name: held_out_windows(data, name, settings["length"], HELD_OUT_WINDOWS) for name in settings["shares"]
        }
        self.metrics = JsonLines(out / "metrics.jsonl", "restore or delete it", "go on with the run")
        if out.is_dir():
            self.metrics.rewrite([record for record in self.metrics.read() if record["step"] <= self.step])
        compiled = torch.compile if settings["compile"] else lambda function: function
        self._loss, self._leaving = compiled(self._eager_loss), compiled(self._eager_leaving)
        self._own, self._told = OwnTexts(self.stream, self._write_bf16, settings["seed"]), self.step
        if settings["leave_loops"]:
            self._before = AutoModelForCausalLM.from_pretrained(
                settings["init"], dtype=torch.float32, attn_implementation=register()
            ).requires_grad_(False)
            self._own.refresh(self.step)

    def _eager_loss(self, embedded_BTD: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = self.model(inputs_embeds=embedded_BTD, use_cache=False).logits
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())

    def _eager_leaving(
        self, embedded_BTD: Tensor, before_BTV: Tensor, labels_BT: Tensor, marked_BT: Tensor
    ) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = self.model(inputs_embeds=embedded_BTD, use_cache=False).logits
        return leaving(logits_BTV.float(), before_BTV.float(), labels_BT, marked_BT)

    def leaving(self, tokens_BT: Tensor, marked_BT: Tensor) -> Tensor:
        """Return how badly the model leaves loops at the marked ones of (B, T) tokens, on average, in nats."""
        embedded_BTD = F.embedding(tokens_BT[:, :-1], self.model.get_input_embeddings().weight)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            before_BTV = self._before(tokens_BT[:, :-1], use_cache=False).logits
        return self._leaving(embedded_BTD, before_BTV, tokens_BT[:, 1:], marked_BT[:, 1:])

    def _write_bf16(self, folder: Path) -> None:
        write_model(self.model, self.tokenizer, folder, torch.bfloat16)

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy of (B, T + 1) tokens in nats."""
        # Looked up outside of what is compiled, since compiled code adds up its gradient in any order.
        weight_VD = self.model.get_input_embeddings().weight
        return self._loss(F.embedding(tokens_BT[:, :-1], weight_VD), tokens_BT[:, 1:])

    def advance(self) -> float:
        """Do one step and return its loss."""
        settings = self.settings
        rate = rate_at(self.step, settings["rate"], settings["begun"], settings["cooling_steps"])
        parts = self.stream.next_batch().split(settings["part"])
        total = 0.0
        for tokens_BT in parts:
            loss = self.loss(tokens_BT) / len(parts)
            loss.backward()
            total += loss.item()
        if settings["leave_loops"]:
            if self.step - self._told >= settings["own_every"]:
                self._refresh()
            own = self._own.take(settings["part"])
            if own is not None:
                (settings["leave_loops"] * self.leaving(*own)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Return the loss on the held-out windows of each source, in nats a token."""
        self.model.eval()
        part = self.settings["part"]
        losses = {
            name: round(sum(self.loss(each).item() * len(each) for each in windows.split(part)) / len(windows), 4)
            for name, windows in self.held_out.items()
        }
        self.model.train()
        return losses

    def log(self, record: dict[str, Any]) -> None:
        """Print a record and add it to the metrics."""
        print(json.dumps(record), flush=True)
        self.metrics.append(record)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""

        def fill(folder: Path) -> None:
            write_model(self.model, self.tokenizer, folder, torch.float32)

        self.checkpoints.save(self.step, fill, {}, optimizer_tensors(self.optimizers))
        # As whoever goes on from here does, so that both do the same.
        if self.settings["leave_loops"]:
            self._refresh()

    def _refresh(self) -> None:
        """Let the model write texts of its own, as it is now."""
        self._own.refresh(self.step)
        self._told = self.step

    def run(self, last: int | None, stopped: Callable[[], bool]) -> None:
        """Train up to a step, or until told to stop; evaluate and save on the way and at the end."""
        settings = self.settings
        tokens_a_step = settings["batch"] * settings["length"]
        if not self.step:
            self.log({"step": 0, "held_out": self.held_out_losses()})
            self.save()
        saved, shown, losses = time.monotonic(), time.monotonic(), []
        while not stopped() and (last is None or self.step < last):
            losses.append(self.advance())
            if self.step % settings["log_every"] == 0:
                now = time.monotonic()
                self.log({
                    "step": self.step, "tokens": self.step * tokens_a_step, "loss": round(sum(losses) / len(losses), 4),
                    "tokens_per_s": round(len(losses) * tokens_a_step / (now - shown)), "epochs": self.stream.epochs(),
                    **({"looping": round(self._own.share, 3)} if settings["leave_loops"] else {}),
                })
                shown, losses = now, []
            if self.step % settings["evaluate_every"] == 0:
                self.log({"step": self.step, "held_out": self.held_out_losses()})
                shown, losses = time.monotonic(), []
            if time.monotonic() - saved > settings["save_minutes"] * 60:
                self.save()
                saved = time.monotonic()
        if self.checkpoints.linked(LATEST) != self.step:
            if self.step == last and self.step % settings["evaluate_every"]:
                self.log({"step": self.step, "held_out": self.held_out_losses()})
            self.save()


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, shards: str = "1GB"
) -> None:
    """Write a model folder in a dtype, in shards of at most so many bytes, without the tied head."""
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model.save_pretrained(folder, state_dict=state, max_shard_size=shards)
    # It writes down the dtype of the model's weights, and not that of those it is given.
    config = storage.read_json(folder / "config.json")
    storage.write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    tokenizer.save_pretrained(folder)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run: those it began with, or new ones; DraftsmithError where neither is complete."""
    path = args.out / SETTINGS
    if path.exists():
        if args.init or args.data:
            raise DraftsmithError(f"{args.out} already holds a run; leave out --init and --data to go on with it.")
        return storage.read_json(path)
    if not (args.init and args.data):
        raise DraftsmithError(f"{args.out} holds no run yet; give --init and --data to begin one.")
    names = (
        "length", "batch", "part", "rate", "seed", "compile", "save_minutes", "evaluate_every", "log_every",
        "leave_loops", "own_every",
    )
    settings = {name: getattr(args, name) for name in names}
    settings |= {"data": str(args.data.resolve()), "init": str(Path(args.init).resolve()), "shares": SHARES}
    settings |= {"data_hash": storage.sha256(args.data / storage.MANIFEST), "begun": 0, "cooling_steps": 0}
    args.out.mkdir(parents=True, exist_ok=True)
    storage.write_json(path, settings)
    return settings


def begin_cooling(out: Path, settings: dict[str, Any], tokens: int, leave_loops: float) -> Path:
    """Copy the latest checkpoint to a run of its own, OUT/cooled, whose rate falls, and return its folder.

    A cooling run that is there and was cut off goes on, with another weight of the loss against loops if one is given;
    one that is done makes room for the next.
    """
    cooled = out / "cooled"
    latest = Checkpoints(out, KEPT_CHECKPOINTS).load()
    begun = latest.progress["step"]
    steps = max(1, tokens // (settings["batch"] * settings["length"]))
    if (cooled / SETTINGS).exists():
        old = storage.read_json(cooled / SETTINGS)
        end = old["begun"] + old["cooling_steps"]
        if Checkpoints(cooled, KEPT_CHECKPOINTS).load().progress["step"] < end:
            if leave_loops:
                storage.write_json(cooled / SETTINGS, old | {"leave_loops": leave_loops})
            return cooled
        cooled.rename(out / f"cooled-{end:08d}")

    def fill(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(latest.folder, dtype=torch.float32)
        write_model(model, AutoTokenizer.from_pretrained(latest.folder), folder, torch.float32)

    cooled.mkdir(exist_ok=True)
    Checkpoints(cooled, KEPT_CHECKPOINTS).save(begun, fill, {}, latest.optimizer)
    changed = {"begun": begun, "cooling_steps": steps, "leave_loops": leave_loops or settings["leave_loops"]}
    storage.write_json(cooled / SETTINGS, settings | changed)
    return cooled


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, or other arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the run's folder; what it holds is gone on with")
    parser.add_argument("--data", type=Path, help="what demo_data.py wrote, to begin")
    parser.add_argument("--init", help="warm start, to begin: a model folder with its tokenizer")
    parser.add_argument("--steps", type=int, help="stop at this step; without it, when told to")
    parser.add_argument("--cool", type=int, metavar="TOKENS", help="cool the latest checkpoint over so many tokens")
    parser.add_argument("--export", type=Path, help="write the latest checkpoint there, in bf16, and train nothing")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--part", type=int, default=8, help="windows at once")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=2e-3, help="the flat rate")
    parser.add_argument("--leave-loops", type=float, default=0.0, help="weight of the loss that teaches to leave loops")
    parser.add_argument("--own-every", type=int, default=25, help="steps until the model writes texts anew")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps")
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, stopped: Callable[[], bool] | None = None) -> None:
    """Begin, go on, cool down or export."""
    args = parse(arguments)
    out, last, settings = args.out, args.steps, settings_of(args)
    if args.cool:
        out = begin_cooling(args.out, settings, args.cool, args.leave_loops)
        settings = storage.read_json(out / SETTINGS)
        end = settings["begun"] + settings["cooling_steps"]
        last = end if args.steps is None else min(end, args.steps)
    checkpoints = Checkpoints(out, KEPT_CHECKPOINTS)
    found = checkpoints.load() if checkpoints.steps() else None
    if args.export:
        folder = found.folder if found else Path(settings["init"])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        write_model(model, AutoTokenizer.from_pretrained(folder), args.export, torch.bfloat16, "14MB")
        return
    if storage.sha256(Path(settings["data"]) / storage.MANIFEST) != settings["data_hash"]:
        raise DraftsmithError(f"{settings['data']} has changed since {out} began; restore it, or begin another run.")
    with checkpoints.held():
        Trainer(out, settings, found).run(last, stopped or (lambda: False))


def run_until_told() -> None:
    """Be the command: Ctrl-C and SIGTERM let the step and its checkpoint be finished; a mistake is one sentence."""
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _frame: told.append(which))
    try:
        main(stopped=lambda: bool(told))
    except DraftsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run_until_told()
