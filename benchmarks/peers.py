"""Greedy tokens a second at batch 1, ours and those of other decoders of the same weights, plainly and speculating.

    python benchmarks/peers.py

draftsmith       plainly, and with its speculator under `--plan`
transformers     `generate` plainly, and with `prompt_lookup_num_tokens`
llama.cpp        llama-cpp-python's `Llama.generate` on the weights exported as bf16 GGUF, plainly, and with its
                 `LlamaPromptLookupDecoding`; left out, with a sentence, where the packages are missing

All settings take turns on the same held-out prompts in one process, in random order, after a warm-up; every side has to
give exactly the tokens asked for, and their number is written down. Time is the wall-clock of a whole call, prefill
included; nothing of a prompt is kept from the call before. Token ids go in and out on every side, so no tokenizer is
timed. Speculation by lookup copies from the prompt and the text so far and needs no trained drafter: this compares what
each side brings, not one method thrice. llama-cpp-python's lookup also computes and copies the logits behind all tokens
of the prompt, which its plain decoding does not. In bf16 texts may part at ties: shown is how many are the same as our
plain ones, and as the same decoder's own plain ones.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
    PLAIN,
    TRANSFORMERS,
    Setting,
    arguments,
    as_json,
    bootstrap,
    finish,
    interleave,
    main,
    make_plan,
    make_prompts,
    open_drafter,
    plans_within,
    pooled_tau,
    say,
    show_table,
    start,
    statistics_of,
    tokens_of,
    walls,
    with_engine,
    with_peer,
)
from gguf_export import about_llama_cpp, add_peer_site, find_packages, quiet_llama_cpp, write_gguf
from transformers import AutoModelForCausalLM, GenerationConfig

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import Peer, TimedCall
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.losslessness import first_divergence
from draftsmith.evaluation.measuring.peers import transformers_peer
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

DRAFTSMITH = "draftsmith"
LLAMA_CPP = "llama.cpp"
LOOKUP = "prompt lookup"
SPECULATOR = "speculator"


def key(decoder: str, way: str) -> str:
    """Name a setting."""
    return f"{decoder}, {way}"


def transformers_lookup_peer(folder: str, guesses: int) -> Peer:
    """Load the weights for transformers' own `generate` with guesses looked up in the prompt and the text so far."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
    # The count has to be exact, so the end token must not end anything.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    @torch.no_grad()
    def decode(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        prompt_1T = torch.tensor([list(prompt) for prompt in prompts])
        begun = time.perf_counter()
        out_1T = model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=new_tokens,
            do_sample=False,
            prompt_lookup_num_tokens=guesses,
        )
        tokens = out_1T[:, prompt_1T.shape[1] :].tolist()
        return tokens, time.perf_counter() - begun

    return decode


@contextmanager
def llama_cpp_peers(folder: str, args: argparse.Namespace) -> Iterator[dict[str, Peer]]:
    """Export the weights, and give llama-cpp-python's decoders of them, plain and with its prompt lookup."""
    api = import_module("llama_cpp")
    speculative = import_module("llama_cpp.llama_speculative")
    quiet_llama_cpp()
    # Its prompt lookup keeps the logits of one evaluation in a table of n_batch rows, addressed by position.
    room = -(-(args.prompt_tokens + args.new_tokens + args.lookup + 1) // 256) * 256
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
        write_gguf(model, path, Path(folder).name)
        opened = [
            api.Llama(
                str(path),
                n_ctx=room,
                n_batch=room,
                n_ubatch=room,
                n_threads=torch.get_num_threads(),
                n_threads_batch=torch.get_num_threads(),
                flash_attn=args.flash_attention,
                draft_model=guesser,
                verbose=False,
            )
            for guesser in (None, speculative.LlamaPromptLookupDecoding(num_pred_tokens=args.lookup))
        ]
        try:
            yield dict(zip((PLAIN, LOOKUP), map(llama_cpp_peer, opened), strict=True))
        finally:
            for llama in opened:
                llama.close()


def llama_cpp_peer(llama: Any) -> Peer:
    """Decode greedily by `Llama.generate`, which stops at no token of its own accord."""

    def decode(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        (prompt,) = prompts
        llama.reset()  # else it would skip what the prompt shares with the last call
        begun = time.perf_counter()
        tokens = []
        for token in llama.generate(list(prompt), temp=0.0):
            tokens.append(int(token))
            if len(tokens) == new_tokens:
                break
        return [tokens], time.perf_counter() - begun

    return decode


def cell_of(
    runs: Sequence[TimedCall], own: Sequence[TimedCall], ours: Sequence[TimedCall], best: Sequence[TimedCall],
    args: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of one setting.

    Args:
        own: plain decoding by the same decoder.
        ours: our plain decoding.
        best: ours with the speculator.
    """
    seconds = walls(runs)
    new_tokens = args.new_tokens
    cell: dict[str, Any] = {
        "tokens_per_second": as_json(bootstrap(len(runs), lambda t: new_tokens / float(seconds[t].mean()), args.seed)),
        "times_slower_than_our_plain": as_json(ratio_interval(seconds, walls(ours), seed=args.seed)),
        "times_slower_than_our_speculator": as_json(ratio_interval(seconds, walls(best), seed=args.seed)),
        "generated_tokens": tokens_of(runs),
        "texts": len(runs),
        "texts_identical_to_our_plain": identical(runs, ours),
        "texts_identical_to_own_plain": identical(runs, own),
        "tau": None,
        "wall_s": seconds.tolist(),
    }
    statistics = statistics_of(runs)
    if statistics:
        steps = torch.tensor([s.steps for s in statistics]).numpy()
        accepted = torch.tensor([s.accepted for s in statistics]).numpy()
        cell["tau"] = as_json(bootstrap(len(runs), pooled_tau(accepted, steps), args.seed))
    return cell


def identical(runs: Sequence[TimedCall], others: Sequence[TimedCall]) -> int:
    """Count the texts that are the same to the last token."""
    pairs = zip(runs, others, strict=True)
    return sum(first_divergence(0, left.tokens[0], right.tokens[0]) is None for left, right in pairs)


def shown_interval(value: Mapping[str, Any], digits: int) -> str:
    """Write an estimate of a cell with its interval."""
    low, high = value["ci95"]
    return f"{value['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "peers")
    parser.set_defaults(threads=2)
    parser.add_argument("--plan", default="1,1,1", help="of our speculator")
    parser.add_argument("--level", default="off", help="of our engine; a native target has nothing to compile")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--prompts", type=int, default=24, help="a task")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--lookup", type=int, default=10, help="tokens that the others' prompt lookup guesses at most")
    parser.add_argument("--llama-cpp", action=argparse.BooleanOptionalAction, default=True, help="measure llama.cpp")
    parser.add_argument(
        "--flash-attention", action=argparse.BooleanOptionalAction, default=True, help="llama.cpp's fused attention"
    )
    add_peer_site(parser)
    args = start(parser)
    if args.device != "cpu" or args.dtype != "bf16":
        raise DraftsmithError("this benchmark is about bf16 on a CPU; --device and --dtype cannot be changed.")
    folder = args.target or str(assets.demo_target())
    target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device)
    drafter = open_drafter(args.drafter, target)
    if not plans_within([args.plan], drafter) or args.plan == PLAIN:
        raise DraftsmithError(f"the plan {args.plan} is none for this drafter; give one it is deep enough for.")
    length = args.prompt_tokens + args.new_tokens
    engine = Engine(
        target, drafter, max_batch=1, max_length=length, share_prefixes=False, compile=args.level
    )
    say(f"{target.name}: {target.backend.description}")
    ours, best = key(DRAFTSMITH, PLAIN), key(DRAFTSMITH, f"{SPECULATOR} {args.plan}")
    settings: dict[str, Setting] = {}
    for name, plan in ((ours, NO_DRAFT), (best, make_plan(args.plan))):
        say(f"{name}: ready after {engine.prepare(1, plan):.1f} s")
        settings[name] = with_engine(engine, plan, args.new_tokens)
    settings[key(TRANSFORMERS, PLAIN)] = with_peer(transformers_peer(folder, target), args.new_tokens)
    looking_up = transformers_lookup_peer(folder, args.lookup)
    settings[key(TRANSFORMERS, LOOKUP)] = with_peer(looking_up, args.new_tokens)
    about: dict[str, str] = {}
    tasks: dict[str, Any] = {}
    rows = []
    with ExitStack() as stack:
        if args.llama_cpp:
            missing = find_packages(args.peer_site)
            if missing is not None:
                say(f"llama.cpp is left out: {missing}")
            else:
                about = about_llama_cpp()
                for way, peer in stack.enter_context(llama_cpp_peers(folder, args)).items():
                    settings[key(LLAMA_CPP, way)] = with_peer(peer, args.new_tokens)
        for task in args.tasks:
            prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
            runs = interleave(settings, prompts, args.warmups, args.seed, task)
            tasks[task] = {}
            for name, mine in runs.items():
                own = runs[key(name.partition(",")[0], PLAIN)]
                tasks[task][name] = cell_of(mine, own, runs[ours], runs[best], args)
            for name, cell in tasks[task].items():
                rows.append(
                    [
                        name,
                        task,
                        shown_interval(cell["tokens_per_second"], 1),
                        shown_interval(cell["times_slower_than_our_plain"], 2),
                        shown_interval(cell["times_slower_than_our_speculator"], 2),
                        shown_interval(cell["tau"], 2) if cell["tau"] else "",
                        f"{cell['texts_identical_to_our_plain']} of {cell['texts']}",
                        f"{cell['texts_identical_to_own_plain']} of {cell['texts']}",
                        str(cell["generated_tokens"]),
                    ]
                )
    show_table(
        f"Greedy, batch 1, {target.name}, bf16, {torch.get_num_threads()} threads, prompts of {args.prompt_tokens} "
        f"tokens, {args.new_tokens} new ones, {args.prompts} prompts a task (95 % intervals; time paired by prompt)",
        ["", "task", "tokens/s", "time over our plain", "time over our speculator", "τ", "as our plain text",
         "as own plain text", "tokens"],
        rows,
    )
    implementation = {"implementation": target.backend.description, "drafter": args.drafter or "embedded"}
    finish(args, {"tasks": tasks}, target=target.name, dtype=args.dtype, peers=about, **implementation)


if __name__ == "__main__":
    main(run)
