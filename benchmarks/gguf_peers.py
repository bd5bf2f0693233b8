"""Greedy tokens a second beside llama.cpp on the same weights: plain, in fewer bits, and with a draft in fewer bits.

    python benchmarks/padded.py --size 0.5b --out /tmp/padded-0.5b
    python benchmarks/gguf_peers.py --target /tmp/padded-0.5b --peer-site ENVIRONMENT/lib/python3.11/site-packages

draftsmith       plainly, and with every one of `--drafters`: PLAN@DRAFTER, or DRAFTER for a chain of `--chain`
llama.cpp        the same weights as GGUF: bf16, and Q8_0 and Q4_0 as its own quantisation makes them, plainly; and
                 bf16 with the Q4_0 file as its draft model, `--chain` tokens at a time. llama-cpp-python has a hook
                 for draft models and none that is a model, so this one is a second `Llama` behind that hook

All settings take turns on the same held-out prompts in one process, in random order, after a warm-up; every side has to
give exactly the tokens asked for. Time is the wall-clock of a whole call, prefill included; nothing of a prompt is kept
from the call before. Token ids go in and out on every side. Q8_0 and Q4_0 write the text of another model: shown is
which part of the tokens, up to the first that differs, and how many texts are those of the same decoder in bf16.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import (
    PLAIN,
    Setting,
    arguments,
    as_json,
    bootstrap,
    finish,
    interleave,
    main,
    make_plan,
    make_prompts,
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
from peers import DRAFTSMITH, LLAMA_CPP, identical, key, llama_cpp_peer
from transformers import AutoModelForCausalLM

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import Peer, TimedCall
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.losslessness import first_divergence
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

BF16, Q8, Q4 = "bf16", "Q8_0", "Q4_0"
FILE_TYPES = {Q8: "LLAMA_FTYPE_MOSTLY_Q8_0", Q4: "LLAMA_FTYPE_MOSTLY_Q4_0"}


def write_files(
    folder: str, out: Path, quantised: Sequence[str] = tuple(FILE_TYPES), vocabulary: bool = False
) -> dict[str, Path]:
    """Write the weights as GGUF in bf16, and as llama.cpp quantises them; with the vocabulary where text is wanted."""
    api = import_module("llama_cpp")
    quiet_llama_cpp()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
    paths = {name: out / f"{name}.gguf" for name in (BF16, *quantised)}
    write_gguf(model, paths[BF16], Path(folder).name, Path(folder) if vocabulary else None)
    for name in quantised:
        params = api.llama_model_quantize_default_params()
        params.ftype = getattr(api, FILE_TYPES[name])
        params.nthread = torch.get_num_threads()
        status = api.llama_model_quantize(str(paths[BF16]).encode(), str(paths[name]).encode(), params)
        if status:
            raise DraftsmithError(f"llama.cpp could not quantise {paths[BF16].name} to {name}.")
    return paths


def second_model(llama: Any, guesses: int) -> Any:
    """Return a draft model for llama-cpp-python's hook: another `Llama` that goes on greedily."""
    base = import_module("llama_cpp.llama_speculative").LlamaDraftModel

    class SecondModel(base):  # type: ignore[misc, valid-type]
        """Guesses what the other model would write; it reads again only what it has not read yet."""

        def __call__(self, input_ids: np.ndarray, /, **_: Any) -> np.ndarray:
            tokens: list[int] = []
            for token in llama.generate(input_ids.tolist(), temp=0.0):
                tokens.append(int(token))
                if len(tokens) == guesses:
                    break
            return np.array(tokens, dtype=np.intc)

    return SecondModel()


@contextmanager
def llama_cpp_peers(paths: Mapping[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Peer]]:
    """Open the files; give the decoders by what they are called."""
    api = import_module("llama_cpp")
    # With a draft it keeps the logits of one evaluation in a table of n_batch rows, addressed by position.
    room = -(-(args.prompt_tokens + args.new_tokens + args.chain + 1) // 256) * 256
    opened: list[Any] = []

    def open_file(name: str, draft: Any = None) -> Any:
        opened.append(
            api.Llama(
                str(paths[name]), n_ctx=room, n_batch=room, n_ubatch=room, n_threads=torch.get_num_threads(),
                n_threads_batch=torch.get_num_threads(), flash_attn=args.flash_attention, draft_model=draft,
                verbose=False,
            )
        )
        return opened[-1]

    try:
        peers = {f"{name} plain": llama_cpp_peer(open_file(name)) for name in paths}
        drafting = open_file(Q4)
        plain = llama_cpp_peer(open_file(BF16, second_model(drafting, args.chain)))

        def drafted(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], float]:
            drafting.reset()
            return plain(prompts, new_tokens)

        yield peers | {f"{BF16}, {Q4} drafts {args.chain}": drafted}
    finally:
        for llama in opened:
            llama.close()


def agreement(runs: Sequence[TimedCall], others: Sequence[TimedCall]) -> float:
    """Return which part of the tokens comes before the first that differs."""
    same = 0
    for left, right in zip(runs, others, strict=True):
        found = first_divergence(0, left.tokens[0], right.tokens[0])
        same += len(left.tokens[0]) if found is None else found.position
    return same / tokens_of(runs)


def cell_of(
    runs: Sequence[TimedCall], own: Sequence[TimedCall], ours: Sequence[TimedCall], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of one setting; `own` is the same decoder plainly in bf16, `ours` is our plain decoding."""
    seconds = walls(runs)
    statistics = statistics_of(runs)
    tau = None
    if statistics:
        accepted, steps = (np.array([getattr(s, name) for s in statistics]) for name in ("accepted", "steps"))
        tau = as_json(bootstrap(len(runs), pooled_tau(accepted, steps), args.seed))
    return {
        "tokens_per_second": as_json(
            bootstrap(len(runs), lambda t: args.new_tokens / float(seconds[t].mean()), args.seed)
        ),
        "speed_over_our_plain": as_json(ratio_interval(list(walls(ours)), list(seconds), seed=args.seed)),
        "speed_over_own_bf16": as_json(ratio_interval(list(walls(own)), list(seconds), seed=args.seed)),
        "generated_tokens": tokens_of(runs),
        "texts": len(runs),
        "texts_as_own_bf16": identical(runs, own),
        "tokens_as_own_bf16": agreement(runs, own),
        "texts_as_our_plain": identical(runs, ours),
        "tokens_as_our_plain": agreement(runs, ours),
        "tau": tau,
        "wall_s": seconds.tolist(),
    }


def shown(value: Mapping[str, Any]) -> str:
    """Write an estimate of a cell with its interval."""
    low, high = value["ci95"]
    return f"{value['value']:.2f} [{low:.2f}, {high:.2f}]"


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "gguf_peers")
    parser.set_defaults(threads=2)
    parser.add_argument(
        "--drafters", nargs="+", default=["int4-self"],
        help="ours: words with options, or folders; one with a plan of its own is PLAN@WORD, tree:2,2,2/9@FOLDER",
    )
    parser.add_argument("--chain", type=int, default=5, help="guesses at a time, of ours and of llama.cpp's")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--prompts", type=int, default=12, help="a task")
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--flash-attention", action=argparse.BooleanOptionalAction, default=True, help="llama.cpp's fused attention"
    )
    add_peer_site(parser)
    args = start(parser)
    if args.device != "cpu" or args.dtype != "bf16":
        raise DraftsmithError("this benchmark is about bf16 on a CPU; --device and --dtype cannot be changed.")
    missing = find_packages(args.peer_site)
    if missing is not None:
        raise DraftsmithError(missing)
    folder = args.target or str(assets.demo_target())
    target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device)
    say(f"{target.name}: {target.backend.description}")
    length = args.prompt_tokens + args.new_tokens
    ours = key(DRAFTSMITH, PLAIN)
    plain = Engine(target, max_batch=1, max_length=length, share_prefixes=False)
    settings: dict[str, Setting] = {ours: with_engine(plain, NO_DRAFT, args.new_tokens)}
    for given in args.drafters:
        shape, _, name = given.rpartition("@")
        plan = make_plan(shape) if shape else Plan((1,) * args.chain)
        engine = Engine(target, load_drafter(name, target), max_batch=1, max_length=length, share_prefixes=False)
        settings[key(DRAFTSMITH, f"{name} {shape or args.chain}")] = with_engine(engine, plan, args.new_tokens)
    tasks: dict[str, Any] = {}
    rows = []
    with ExitStack() as stack:
        paths = write_files(folder, Path(stack.enter_context(TemporaryDirectory())))
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        say("; ".join(f"{name}: {size / 1e6:,.0f} MB" for name, size in sizes.items()))
        for way, peer in stack.enter_context(llama_cpp_peers(paths, args)).items():
            settings[key(LLAMA_CPP, way)] = with_peer(peer, args.new_tokens)
        for task in args.tasks:
            prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
            runs = interleave(settings, prompts, args.warmups, args.seed, task)
            base = {DRAFTSMITH: runs[ours], LLAMA_CPP: runs[key(LLAMA_CPP, f"{BF16} plain")]}
            tasks[task] = {
                name: cell_of(mine, base[name.partition(",")[0]], runs[ours], args) for name, mine in runs.items()
            }
            for name, cell in tasks[task].items():
                rows.append(
                    [name, task, shown(cell["tokens_per_second"]), shown(cell["speed_over_our_plain"]),
                     shown(cell["speed_over_own_bf16"]), shown(cell["tau"]) if cell["tau"] else "",
                     f"{cell['tokens_as_own_bf16']:.1%}", f"{cell['texts_as_own_bf16']} of {cell['texts']}",
                     f"{cell['texts_as_our_plain']} of {cell['texts']}", str(cell["generated_tokens"])]
                )
    show_table(
        f"Greedy, one prompt of {args.prompt_tokens} tokens at a time, {args.new_tokens} new ones, {target.name}, "
        f"{torch.get_num_threads()} threads, {args.prompts} prompts a task (95 % intervals; ratios paired by prompt)",
        ["", "task", "tokens/s", "over our plain", "over own bf16", "τ", "tokens as own bf16", "texts as own bf16",
         "texts as our plain", "tokens"],
        rows,
    )
    finish(
        args, {"tasks": tasks, "file_bytes": sizes}, target=target.name, dtype=args.dtype, peers=about_llama_cpp(),
        implementation=target.backend.description,
    )


if __name__ == "__main__":
    main(run)
