"""Drafters with weights: one forward for training and decoding, one folder for a checkpoint.

Shapes: B rows, T positions, R rows of any origin, N depths, F feature width, S state width, V vocabulary, W drafted
vocabulary (V, or the most frequent few tokens), k children.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from draftsmith.drafters import storage
from draftsmith.drafters.base import StagewiseDrafter, best
from draftsmith.drafters.grow import grow
from draftsmith.drafters.lesson import Lesson
from draftsmith.native.layers import pack_linears
from draftsmith.target.packing import can_prepack, prepack_linears
from draftsmith.types import Context, Draft, DraftsmithError, Plan, TargetFacts

if TYPE_CHECKING:
    from draftsmith.target import Target


class TrainableDrafter(StagewiseDrafter, nn.Module):
    """A drafter with weights.

    Law, tested for every family: what `propose` drafts greedily is what `forward` predicts when fed its own output.
    """

    d2t: Tensor | None
    """The ids of the tokens that are scored (W), or None when all are."""
    is_ready: bool = False
    """Whether it was made ready to decode, after which it can neither be trained nor saved."""
    family_name: str
    weights_file: str = "model.safetensors"
    tensor_prefix: str = ""
    """What the published checkpoints put before the names of the tensors."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict, at every depth d, the token d + 1 after `tokens_BT[:, t]`.

        `features_BTF[:, t]` predicted `tokens_BT[:, t]`. Entry d of the result is (B, T - d, V): at position t it has
        read features[t] and tokens[t .. t + d], and predicts tokens[t + d + 1].
        """

    @abstractmethod
    def losses(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Return loss_N in nats, which sums to the training loss, and the share of right first guesses hits_N."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the object of config.json, in the published layout where the family has one."""

    @classmethod
    @abstractmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Tell whether a config.json's object belongs to this family."""

    @classmethod
    @abstractmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> Self:
        """Build the drafter that a config.json at `origin` describes; `tensors` are then copied in.

        They are given because some families tell the drafted vocabulary, or a size, only there. DraftsmithError for a
        config that lacks something, or a drafter that does not fit the target.
        """

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices between hidden states, which some optimizers treat apart from tables and norms."""
        return []

    def published_name(self, name: str) -> str:
        """Return what a tensor of `state_dict` is called in the checkpoint."""
        return self.tensor_prefix + name

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point whatever is borrowed from the target at it; most families borrow nothing."""
        return

    def pack(self, target: "Target") -> None:
        """Turn linear layers into what decodes fastest, in place; guesses need not be exact, so int8 will do."""
        if target.native:
            pack_linears(self, lambda _: True)
        elif can_prepack(target.device, target.dtype):
            prepack_linears(self, lambda: target.packed)

    def make_ready(self, target: "Target") -> Self:
        """Turn into what decodes for this target, in place: its dtype and device, no gradients, packed."""
        self.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.bind(target)
        self.pack(target)
        self.is_ready = True
        return self

    @torch.no_grad()
    def for_decoding(self, target: "Target") -> Self:
        """Return a copy as it decodes. The copy guesses; only the original can be trained or saved."""
        if self.is_ready:
            raise DraftsmithError("this drafter is packed for decoding already; use it, or load it anew.")
        return copy.deepcopy(self).make_ready(target)

    def limit_vocabulary(self, draft_tokens: Tensor | None, size: int) -> None:
        """Register the drafted vocabulary: `size` token ids, or None with a size of 0 for all tokens."""
        if (draft_tokens is None) != (size == 0) or (draft_tokens is not None and draft_tokens.shape != (size,)):
            raise DraftsmithError(f"draft_vocab_size is {size}, so exactly that many draft tokens have to be given.")
        self.register_buffer("d2t", None if draft_tokens is None else draft_tokens.to(torch.int64).clone())
        if draft_tokens is None:
            return
        if len(draft_tokens.unique()) != size:
            raise DraftsmithError("the draft vocabulary lists a token twice; list each once.")
        if not 0 <= int(draft_tokens.min()) <= int(draft_tokens.max()) < self.vocab_size:
            raise DraftsmithError(
                f"the draft vocabulary names a token outside the {self.vocab_size} of the target; mend its d2t."
            )

    def to_vocabulary(self, scores: Tensor) -> Tensor:
        """Spread scores (…, W) over the whole vocabulary (…, V); tokens that are never drafted get -inf."""
        if self.d2t is None:
            return scores
        whole = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy(-1, self.d2t, scores)

    def best_tokens(self, logits_RW: Tensor, k: int, scores: bool) -> tuple[Tensor | None, Tensor]:
        """Return log q of the k best tokens (R, k), or None unless `scores`, and their ids (R, k)."""
        logits_Rk, indices_Rk = best(logits_RW, k)
        log_q_Rk = logits_Rk.float() - logits_RW.float().logsumexp(-1, keepdim=True) if scores else None
        return log_q_Rk, indices_Rk if self.d2t is None else self.d2t[indices_Rk]

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain or tree."""
        return grow(self, context, plan)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def write_files(
        self, folder: Path, facts: TargetFacts, extra: Mapping[str, Any] | None = None, repeat_tied: bool = True
    ) -> None:
        """Write config.json and the weights; what is ours alone goes under the key `draftsmith`.

        With `repeat_tied`, a tied tensor is written under each of its names, as some readers expect; else once.
        """
        if self.is_ready:
            raise DraftsmithError("this drafter is packed for decoding; save the one it was made from.")
        config = {
            **self.describe(),
            "torch_dtype": str(next(self.parameters()).dtype).removeprefix("torch."),
            "draftsmith": {"target": asdict(facts), **(extra or {})},
        }
        storage.write_json(folder / "config.json", config)
        unique = {name for name, _ in (*self.named_parameters(), *self.named_buffers())}
        tensors = {
            self.published_name(name): tensor
            for name, tensor in self.state_dict().items() if repeat_tied or name in unique
        }
        storage.write_tensors(folder / self.weights_file, self.to_published(tensors))

    def save_pretrained(
        self, folder: Path, facts: TargetFacts, extra: Mapping[str, Any] | None = None, repeat_tied: bool = True
    ) -> None:
        """Write the checkpoint folder at once or not at all, with a manifest; see `write_files`."""
        storage.write_folder(Path(folder), lambda aside: self.write_files(aside, facts, extra, repeat_tied))

    def to_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the checkpoint holds of these tensors, by their published names; `load_published` undoes it."""
        return tensors

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in; a tied tensor may stand under one of its names or under all of them."""
        wanted = self.state_dict()
        twins: dict[int, list[str]] = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            twins.setdefault(id(tensor), []).append(name)
        known = {self.published_name(name): name for name in wanted}
        unknown = tensors.keys() - known.keys()
        if unknown:
            raise DraftsmithError(f"{origin} has a tensor {min(unknown)!r} that is not in its config.json; mend that.")
        for names in twins.values():
            published = [self.published_name(name) for name in names]
            given = next((name for name in published if name in tensors), None)
            if given is None:
                raise DraftsmithError(f"{origin} lacks the tensor {published[0]}; restore it from a good copy.")
            tensor, place = tensors[given], wanted[known[given]]
            if tensor.shape != place.shape:
                raise DraftsmithError(
                    f"tensor {given} in {origin} has shape {tuple(tensor.shape)}, but its config.json says "
                    f"{tuple(place.shape)}; restore the folder from a good copy."
                )
            place.copy_(tensor)

    @classmethod
    def read_tensors(cls, folder: Path) -> dict[str, Tensor]:
        """Read the weights of a checkpoint folder."""
        return storage.read_tensors(folder, cls.weights_file)

    @classmethod
    def from_pretrained(cls, folder: Path, target: "Target | None" = None, dtype: torch.dtype | None = None) -> Self:
        """Read a published or own checkpoint; `target` is compared with it, and lends what is borrowed from it.

        Args:
            dtype: of the weights; None keeps the file's.
        Raises:
            DraftsmithError: missing, damaged or foreign files, pickles, own code, or another target.
        """
        folder = Path(folder)
        storage.require_folder(folder)
        config = storage.read_json(folder / "config.json")
        if not cls.recognises(config):
            raise DraftsmithError(f"{folder} holds a {config.get('model_type')!r}, not {cls.family_name}; give one.")
        if "auto_map" in config:
            raise DraftsmithError(f"{folder / 'config.json'} asks to run its own code (auto_map); remove that key.")
        if target is not None:
            check_target(folder, config.get("draftsmith", {}).get("target", {}), target.facts())
        storage.verify_folder(folder)
        tensors = cls.read_tensors(folder)
        drafter = cls.from_config(config, folder / "config.json", target, tensors)
        drafter.to(dtype or next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32))
        drafter.load_published(tensors, folder)
        if target is not None:
            drafter.to(target.device)
            drafter.bind(target)
        return drafter

    def sizes(self) -> dict[str, Any]:
        """Return what has to agree for weights to be taken over from another, under the names a recipe has for it."""
        return self.describe()

    @torch.no_grad()
    def start_from(self, folder: Path, target: "Target") -> None:
        """Take over the weights of a checkpoint of the same shape; one that scores all tokens may become limited.

        Raises:
            DraftsmithError: a checkpoint of another shape, or anything that `from_pretrained` refuses.
        """
        other = self.from_pretrained(folder, target, dtype=torch.float32)
        if self.d2t is not None and other.d2t is None:
            other = other.restricted(self.d2t.to(other.device))
        have, want = other.sizes(), self.sizes()
        for name in want:
            if have.get(name) != want[name]:
                raise DraftsmithError(
                    f"drafter.{name} is {want[name]!r}, but drafter.init_from {folder} has {have.get(name)!r}; set "
                    f"drafter.{name} to that."
                )
        self.load_state_dict(other.state_dict())

    def restricted(self, draft_tokens: Tensor) -> Self:
        """Return a copy that scores only these tokens (W); DraftsmithError where the family cannot."""
        raise DraftsmithError(
            f"{self.family_name} that scores all tokens cannot be cut down to {len(draft_tokens)}; set "
            "drafter.draft_vocab_size to 0."
        )

    @classmethod
    def load(cls, folder: Path, target: "Target") -> Self:
        """Load for decoding: in the target's dtype, on its device, packed; not to be trained."""
        return cls.from_pretrained(folder, target, dtype=target.dtype).make_ready(target)


def check_target(origin: Path, made_for: Mapping[str, Any], facts: TargetFacts) -> None:
    """Refuse a target that differs in width, vocabulary or tokenizer from the one the checkpoint was made for.

    Args:
        made_for: `hidden_size`, `vocab_size`, `tokenizer_hash` and `name` as far as they are known.
    """
    drafts = f"{origin} drafts for {made_for['name']!r}" if made_for.get("name") else f"{origin} drafts for a target"
    for word, key, theirs in (
        ("hidden size", "hidden_size", facts.hidden_size),
        ("a vocabulary of", "vocab_size", facts.vocab_size),
        ("tokenizer hash", "tokenizer_hash", facts.tokenizer_hash),
    ):
        own = made_for.get(key)
        if own is not None and theirs is not None and own != theirs:
            raise DraftsmithError(
                f"{drafts} with {word} {own}, but {facts.name!r} has {theirs}; load the target it was trained for, or "
                "train a drafter for this one."
            )


class RowwiseDrafter(TrainableDrafter):
    """A drafter whose guesses depend on the root's state and the tokens after it, and on no other position.

    So every position of a text is an example of its own, and a few of them can be trained on alone. The family gives
    the three functions that its paper gives: what starts, what a depth makes of state and token, and how it scores.
    """

    @abstractmethod
    def start(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F) into what the first depth reads."""

    @abstractmethod
    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Read a state (…, S) and the token chosen from it (…); return the next state (…, S')."""

    @abstractmethod
    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary."""

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        """Start from the root and the state that predicted it."""
        root_B, feature_BF = context.root()
        return root_B, self.start(feature_BF)

    def step(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q (R, V) in fp32 and the state after stage `depth`."""
        state_RS = self.stage(depth, state, tokens_R)
        log_q_RW = torch.log_softmax(self.score(depth, state_RS).float(), dim=-1)
        return self.to_vocabulary(log_q_RW), state_RS

    def top_k(
        self, depth: int, state: Tensor, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Find the best k in the drafted vocabulary, without a softmax unless scores are wanted."""
        state_RS = self.stage(depth, state, tokens_R)
        return *self.best_tokens(self.score(depth, state_RS), k, scores), state_RS

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableDrafter.forward`."""
        length = tokens_BT.shape[1]
        state, logits = self.start(features_BTF), []
        for depth in range(min(self.max_depth, length)):
            state = self.stage(depth, state[:, : length - depth], tokens_BT[:, depth:])
            logits.append(self.to_vocabulary(self.score(depth, state)))
        return logits

    def losses(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every depth, mixed with the divergence from the target where it is asked for."""
        depths = self.max_depth
        tokens_RN, law = lesson.tokens_RN(depths), lesson.law(depths, self.d2t)
        labels_RN = lesson.labels_RN(depths, self.d2t, self.vocab_size)
        state, losses, hits = self.start(lesson.roots_RF()), [], []
        for depth in range(depths):
            state = self.stage(depth, state, tokens_RN[:, depth])
            loss, hit = lesson.judge(depth, self.score(depth, state), labels_RN, law)
            losses.append(loss)
            hits.append(hit)
        return torch.stack(losses), torch.stack(hits)


class FrozenTable(nn.Module):
    """A table of the target's: a buffer that is never trained or saved, so `.to()` cannot alter the target."""

    weight: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score as a head; an embedding is looked up in `weight`."""
        return torch.nn.functional.linear(x, self.weight)
