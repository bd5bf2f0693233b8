"""Is this pair of target and drafter lossless on this machine? `draftsmith prove`, from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import family_of
from draftsmith.evaluation.prompts import Prompt, cut, distinct
from draftsmith.evaluation.proof.greedy import GreedyProof
from draftsmith.evaluation.proof.prove import Proof, SmallPair, Verdict, Workload
from draftsmith.evaluation.proof.prove import prove as prove_pair
from draftsmith.evaluation.proof.sampling import SamplingProof
from draftsmith.evaluation.proof.small_target import small_drafter, small_target
from draftsmith.evaluation.proof.workload import LEAST_DRAWS
from draftsmith.plan import Plan
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.drafts import Drafts, check_drafter
from draftsmith.workflows.models import Loading, dtype_name, load_engine, name_of, quiet
from draftsmith.workflows.sources import fitting_conversations, gather_prompts, name_of_source

QUICK_SHARE = 10
SHORTEST, LONGEST = 16, 64
SAMPLING_PROMPT = 8
PENALISED = 4
"""Tokens of the prompt before the draws with penalties, however short the other prompts are."""


@dataclass(frozen=True)
class ProveResult:
    """The proof, what it was made with, and a description of the drafter used for the small alphabet."""

    provenance: Mapping[str, Any]
    proof: Proof
    small_alphabet: str

    @property
    def verdict(self) -> Verdict:
        """Return lossless, lossless up to ties, lossy by choice or defect."""
        return self.proof.verdict

    @property
    def greedy(self) -> GreedyProof:
        """The part of the proof about greedy text."""
        return self.proof.greedy

    @property
    def sampling(self) -> SamplingProof:
        """The part of the proof about sampled text."""
        return self.proof.sampling

    def sentence(self) -> str:
        """Return the verdict and what it rests on, in one sentence."""
        return self.proof.sentence()

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith prove --json` writes."""
        return {"provenance": dict(self.provenance), **self.proof.summary()}


def prove(
    target: Target | str | Path | None = None,
    drafter: Drafter | str | Path | None = None,
    plan: Plan | Drafts | None = None,
    *,
    prompts: Path | str | Sequence[str | Prompt] | None = None,
    task: str | None = None,
    prompt_count: int = 120,
    work: Workload | None = None,
    quick: bool = False,
    serving: bool = False,
    loading: Loading | None = None,
    console: Console | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ProveResult:
    """Prove, or disprove, that drafting does not change this target's text; see docs/prove.md.

    Args:
        target: a folder, a hub name or a `Target`; the embedded one by default.
        drafter: a folder, a hub name or a `Drafter`; by default the embedded target's own.
        plan: which drafts to make; the drafter's own plan by default.
        prompts: a file, or texts; the embedded held-out ones by default.
        task: use only the prompts of this task.
        prompt_count: number of prompts of the greedy part.
        work: how much else to do; ten times as many draws from the small alphabet are usual.
        quick: use a tenth of the prompts and draws.
        serving: prove it for texts that pass through the server, with 1, 4 and 16 rows; needs the extra `serve`.
        loading: how models given by name are loaded.
        console: where loading is reported; nowhere by default.
        on_progress: receives what is being done, how much of it is done, and how much there is.

    Raises:
        DraftsmithError: nothing drafts, or the settings make no sense.
    """
    if prompt_count < 1:
        raise DraftsmithError(f"--prompts is {prompt_count}; it must be at least 1.")
    loading, console, work = loading or Loading(), console or quiet(), work or Workload()
    if quick:
        prompt_count = max(8, prompt_count // QUICK_SHARE)
        draws = max(LEAST_DRAWS, work.draws // QUICK_SHARE)
        work = replace(work, draws=draws, small_draws=draws * work.small_draws // work.draws)
    asked = Drafts(plan, rules=replace(plan, branching=(), choices=())) if isinstance(plan, Plan) else plan or Drafts()
    texts = gather_prompts(prompts, task)
    engine = load_engine(
        console, target=target, drafter=drafter, dtype=loading.dtype, device=loading.device,
        trust_remote_code=loading.trust_remote_code, native=loading.native, quantize=loading.quantize, max_batch=1,
        max_length=LONGEST + work.new_tokens,
    )
    check_drafter(engine.drafter, asked.rules)
    shape = asked.plan(engine.plan) or engine.plan
    work = fitting(work, engine.target, console)
    windows = ragged(engine.target, texts, prompt_count, work.new_tokens, console)
    if len(windows) < prompt_count:
        console.print(
            f"[dim]The texts give {len(windows)} different prompts, so it is these and not {prompt_count}.[/dim]"
        )
    start = min(SAMPLING_PROMPT, engine.target.max_length - work.joint_tokens)
    toy = small_target()
    named = drafter if isinstance(drafter, str | Path) else str(assets.demo_drafter()) if drafter is None else None
    guesser, words = small_drafter(toy, family_of(named) if named is not None else None)
    pair, starts = SmallPair(toy, guesser, words), [window[:start] for window in windows]
    if serving:
        # The server's code is an optional extra, which the other proof does not need.
        from draftsmith.workflows.serving_proof import prove_served

        proof = prove_served(
            engine.target, engine.drafter, shape, windows, pair, work, sampling_prompts=starts, on_progress=on_progress
        )
    else:
        proof = prove_pair(
            engine.target, engine.drafter, shape, windows, pair, work, sampling_prompts=starts, on_progress=on_progress
        )
    where = provenance(
        target=engine.target.name, drafter=name_of(drafter, assets.DRAFTER_NAME), dtype=dtype_name(engine.target),
        device=str(engine.target.device), forward=engine.target.backend.description, plan=str(shape),
        small_alphabet=words, data=name_of_source(prompts), quick=quick, serving=serving,
    )
    return ProveResult(where, proof, words)


def fitting(work: Workload, target: Target, console: Console) -> Workload:
    """Return the workload, shortened so that prompts fit the target's context too; the console reports any shortening.

    Raises:
        DraftsmithError: the context leaves no room to draw in.
    """
    context = target.max_length
    if context < PENALISED + work.joint_tokens:
        raise DraftsmithError(
            f"--joint-tokens is {work.joint_tokens}, but {target.name} takes {context} tokens, {PENALISED} of them for "
            "a prompt; lower it, or give a target with a longer context."
        )
    most = context - min(SHORTEST, context // 2)
    if work.new_tokens <= most:
        return work
    console.print(
        f"[dim]{target.name} takes {context} tokens, so greedy texts have {most} new ones and not "
        f"{work.new_tokens}.[/dim]"
    )
    return replace(work, new_tokens=most)


def ragged(
    target: Target, texts: Sequence[Prompt], count: int, new_tokens: int, console: Console
) -> list[list[int]]:
    """Return `count` prompts of different lengths for a ragged batch, or as many distinct ones as there are.

    Conversations come first and stay whole, because their last tokens call for the answer; texts are cut.
    """
    longest = min(LONGEST, target.max_length - new_tokens)
    chats = fitting_conversations(target, texts, new_tokens, console)[:count]
    texts, count = [prompt for prompt in texts if prompt.conversation is None], count - len(chats)
    windows = cut(target, texts, max(1, longest), count, exact=False) if texts and count else []
    return distinct([
        *chats,
        *(window[: max(1, longest - (longest - SHORTEST) * (i % 7) // 7)] for i, window in enumerate(windows)),
    ])
