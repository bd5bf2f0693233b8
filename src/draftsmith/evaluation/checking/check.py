"""The checks before a drafter is published: each looks for one cause of served acceptance differing from trained."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import family_of, load_drafter
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.drafters.trainable.model import TrainableModel, other_tokens, other_weights
from draftsmith.engine import Engine
from draftsmith.evaluation.checking.parity import Parity, likely_cause, measure_parity, own_texts, parts_at_a_tie
from draftsmith.evaluation.measuring.intervals import ratio_difference
from draftsmith.evaluation.measuring.losslessness import first_divergence
from draftsmith.evaluation.measuring.measure import Measurement
from draftsmith.evaluation.prompts import distinct
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.targets.token_ids import ways
from draftsmith.types import Completion, DraftsmithError, SamplingParams, Statistics, require_finished

PACKING_POINTS = 0.02
MOST_POINTS = 0.5
"""Points of acceptance that a fault may cost unnoticed; above that, the report asks for more prompts."""
RAGGED = 8


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    passed: bool
    detail: str


@dataclass
class CheckReport:
    """All checks, and acceptance by depth: of the comparison, of the copy that decodes (packed), and of it unpacked."""

    checks: list[Check] = field(default_factory=list)
    parity: Parity | None = None
    packed: list[float] | None = None
    unpacked: list[float] | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check.passed for check in self.checks)

    def sentence(self) -> str:
        """Say the result, and the first failure with its cause."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            return f"FAILED: {failed[0].name}: {failed[0].detail}."
        return f"Passed: all {len(self.checks)} checks; decoding accepts what training predicts."

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "passed": self.passed,
            "sentence": self.sentence(),
            "checks": [asdict(check) for check in self.checks],
            "parity": self.parity.summary() if self.parity is not None else None,
            "accepted_by_depth_as_decoded": self.packed,
            "accepted_by_depth_unpacked": self.unpacked,
        }


def check_files(folder: Path) -> list[Check]:
    """Check that the folder is complete: files, checksums, and finite tensors."""
    checks = []
    try:
        storage.require_folder(folder)
        storage.verify_folder(folder)
        config = storage.read_config(folder)
        tensors = {
            name: tensor for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in storage.read_tensor_file(path).items()
        }
        family = family_of(folder)
        if not tensors and (family is None or family.reopen is not None):
            raise DraftsmithError(f"{folder} has no safetensors file; restore it from a good copy.")
    except DraftsmithError as error:
        return [Check("files", False, str(error).rstrip("."))]
    sealed = (folder / storage.MANIFEST).exists()
    detail = "every file has the sum its manifest lists" if sealed else (
        f"there is no {storage.MANIFEST}, so a damaged file would go unseen; save the drafter again"
    )
    checks.append(Check("files", sealed, detail))
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    declared = config.get("torch_dtype") or config.get("dtype")
    agrees = declared is None or declared in kinds
    checks.append(
        Check(
            "weights and dtype", not broken and agrees,
            f"{broken[0]} holds numbers that are not finite" if broken
            else f"{len(tensors)} tensors, {', '.join(kinds)}" if agrees
            else f"config.json says {declared}, the tensors are {', '.join(kinds)}",
        )
    )
    return checks


def load_pair(folder: Path, target: Target) -> tuple[Drafter | None, Check]:
    """Load a drafter for a target; a refusal, for example because of another tokenizer, becomes a failed check."""
    name = "made for this target"
    try:
        drafter = load_drafter(folder, target)
    except DraftsmithError as error:
        return None, Check(name, False, str(error).rstrip("."))
    recorded = storage.read_json(folder / "config.json").get("draftsmith", {}).get("target", {})
    other = other_weights(folder, recorded, target.facts())
    if other is not None:
        return drafter, Check(name, False, other.rstrip("."))
    kinds = {"tokenizer": "tokenizer_hash", "weights": "fingerprint" if recorded.get("fingerprint") else "weights_hash"}
    unknown = [what for what, key in kinds.items() if recorded.get(key) is None]
    said = ["hidden size", "vocabulary", *(what for what in kinds if what not in unknown)]
    detail = f"{', '.join(said[:-1])} and {said[-1]} agree"
    if unknown:
        detail += f"; the folder records nothing to compare the {' and '.join(unknown)} with"
    return drafter, Check(name, True, detail)


def check_tokens(folder: Path, target: Target) -> Check:
    """Check that the target still makes the tokens of the drafter's training: BOS, chat template, tokenizer."""
    recorded = storage.read_json(folder / "config.json").get("draftsmith", {}).get("target", {})
    name = "tokens as in training"
    found = other_tokens(folder, recorded, target)
    if found is not None:
        return Check(name, False, found.rstrip("."))
    now = ways(target.tokenizer)
    kinds = {"texts": ("text_hash", now.text_hash), "conversations": ("template_hash", now.template_hash)}
    same = [what for what, (field, value) in kinds.items() if None not in (recorded.get(field), value)]
    other = [what for what in kinds if what not in same]
    said = [f"{' and '.join(same)} become the same tokens"] if same else []
    if other:
        said.append(
            f"{' and '.join(other)} were not compared, because the folder does not record how their tokens were made, "
            f"or {target.name!r} does not make any"
        )
    return Check(name, True, "; ".join(said))


def training_form(folder: Path, drafter: Drafter, target: Target) -> TrainableModel:
    """Return the model that has a drafter's training forward: mostly the drafter itself, else its family reopens it.

    Raises:
        DraftsmithError: the drafter has no training forward here.
    """
    if isinstance(drafter, TrainableDrafter):
        return drafter
    family = family_of(folder)
    if family is not None and family.reopen is not None:
        return family.reopen(folder, target, target.dtype).to(target.device).eval()
    raise DraftsmithError(f"{folder} holds a drafter without a training forward, so there is nothing to compare.")


def check_drafter(
    target: Target,
    trained_model: TrainableModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = 48,
    on_progress: Callable[[str], None] = lambda what: None,
) -> CheckReport:
    """Compare decoding with the training forward, for a drafter in its own precision on a target in fp32 or fp64.

    Args:
        trained_model: has the training forward; most often the drafter itself, see `training_form`.
        prompts: of different lengths; the shortest and the longest third are also compared separately.
        on_progress: called with what is being done.
    """
    result = CheckReport()
    on_progress("decoding the target's own text")
    alone = own_texts(target, drafter, trained_model.max_depth, prompts, new_tokens)
    # Prompts repeat where there are few; seeing one twice proves nothing more.
    texts = list({tuple(text.prompt_tokens): text for text in alone}.values())
    on_progress("predicting it with the training forward")
    parity = measure_parity(target, trained_model, texts)
    result.parity = parity
    result.checks.append(_parity_check("parity, depth by depth", target, trained_model, texts, parity))

    what = "features" if trained_model.taps else "guesses"
    on_progress(f"shifting the {what}, to see that the comparison would notice")
    broken = [len(measure_parity(target, trained_model, texts, shift).faults) for shift in (1, -1)]
    result.checks.append(
        Check(
            f"alignment of {what}", min(broken) > len(parity.faults),
            f"{what} one position off would differ at {broken[0]} (late) and {broken[1]} (early) of "
            f"{parity.roots} steps, against {len(parity.faults)}"
            + ("" if min(broken) else "; hardly a guess hits because of what it reads, so there is nothing to compare"),
        )
    )
    ranked = sorted(texts, key=lambda text: len(text.prompt_tokens))
    third = max(1, len(ranked) // 3)
    for name, some in (("short", ranked[:third]), ("long", ranked[-third:])):
        size = f"{len(some[0].prompt_tokens)} to {len(some[-1].prompt_tokens)} tokens"
        found = measure_parity(target, trained_model, some)
        result.checks.append(
            Check(
                f"positions, {name} prompts", found.holds,
                f"{size}: {found.roots} steps, {len(found.faults)} without parity",
            )
        )
    on_progress("the same prompts in a ragged batch")
    together = own_texts(target, drafter, trained_model.max_depth, prompts, new_tokens, RAGGED)
    result.checks.append(_mask_check(target, trained_model, alone, together))
    return result


def _parity_check(
    name: str, target: Target, trained_model: TrainableModel, texts: Sequence[Completion], parity: Parity
) -> Check:
    ties = len(parity.gaps) - len(parity.faults)
    if parity.holds:
        up_to = f", {ties} of them up to a tie (a gap of {parity.gap_points:.2f} points)" if ties else ""
        bound = parity.ruled_out_points
        more = "; raise --prompts to rule out more" if bound > MOST_POINTS else ""
        return Check(
            name, True,
            f"{parity.roots} steps agree{up_to}, so no fault costs more than {bound:.2f} points of acceptance, at 95 %"
            f"{more}",
        )
    first = min(parity.faults, key=lambda gap: gap.depth)
    d = first.depth - 1
    return Check(
        name, False,
        f"{len(parity.faults)} of {parity.roots} steps differ, at depth {first.depth} first (predicted "
        f"{parity.predicted[d]:.1%}, measured {parity.measured[d]:.1%}); likely cause: "
        f"{likely_cause(target, trained_model, texts, parity)}",
    )


def _mask_check(
    target: Target, trained_model: TrainableModel, alone: Sequence[Completion], together: Sequence[Completion]
) -> Check:
    name, ties = f"masks, ragged batch of {RAGGED} against 1", 0
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        item = first_divergence(index, one.accepted_lengths, other.accepted_lengths)
        if item is None:
            continue
        whole = item.expected is not None and item.got is not None
        if not whole or not parts_at_a_tie(target, trained_model, one, other, item.position):
            return Check(
                name, False,
                f"prompt {index}, step {item.position} accepts {item.got} guesses in the batch and {item.expected} "
                "alone; likely cause: a mask or an index that lets a row see padding or another row",
            )
        ties += 1
    up_to = f", {ties} of them up to a tie" if ties else ""
    return Check(name, True, f"{len(alone)} prompts make the same drafts{up_to}")


def check_packing(
    target: Target, packed: Drafter, plain: Drafter, depth: int, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Check, list[float], list[float]]:
    """Measure what packing and quantising the drafter for decoding costs, by depth, on the target as it serves.

    Texts end at the target's end token, as they do in serving.

    Args:
        packed: the copy that decodes.
        plain: the same drafter unpacked, in fp32.
    """
    prompts = distinct(prompts)
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    params, name = SamplingParams(max_tokens=new_tokens), "the copy that decodes"
    runs: list[Measurement] = []
    for drafter in (packed,) if plain.borrows_layers else (packed, plain):
        engine = Engine(target, drafter, plan=Plan((1,) * depth), max_batch=1, max_length=longest)
        runs.append(Measurement(require_finished(engine.generate(prompts, params)), 1.0))
    shares = [(run.accepted_by_depth() + [0.0] * depth)[:depth] for run in runs]
    if plain.borrows_layers:
        detail = "it drafts with the target's own layers, so there is no unpacked copy to compare with"
        return Check(name, True, detail), shares[0], []
    where = f"{str(target.dtype).removeprefix('torch.')} on {target.backend.description}"
    return Check(name, True, f"{where}: {_cost_of_packing(runs[1], runs[0], depth)}"), shares[0], shares[1]


def _cost_of_packing(plain: Measurement, packed: Measurement, depth: int) -> str:
    """Say how many points of acceptance packing costs at the worst depth, and how sure that is."""
    pairs = [
        (one.statistics, other.statistics) for one, other in zip(plain.completions, packed.completions, strict=True)
        if one.statistics.steps and other.statistics.steps
    ]
    if not pairs:
        return "no text is long enough to draft in"
    costs = []
    for d in range(depth):
        before, after = (
            ([_accepted_at(one, d) for one in some], [one.steps for one in some]) for some in zip(*pairs, strict=True)
        )
        costs.append(ratio_difference(before, after))
    worst = max(range(depth), key=lambda d: costs[d].value)
    value, low, high = (100 * part for part in (costs[worst].value, *costs[worst].ends))
    limit = 100 * PACKING_POINTS
    said = f"{value:.1f} points of acceptance at depth {worst + 1} [{low:.1f}, {high:.1f}]"
    if low > limit:
        return f"WARNING: packing costs {said}"
    if max(cost.high for cost in costs) <= PACKING_POINTS:
        return f"at no depth does packing cost more than {limit:.0f} points of acceptance; at most {said}"
    return f"packing costs {said}, too few texts to tell whether more than {limit:.0f}; raise --prompts"


def _accepted_at(found: Statistics, d: int) -> int:
    return found.accepted_by_depth[d] if d < len(found.accepted_by_depth) else 0
