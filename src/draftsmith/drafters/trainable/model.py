"""What a recipe trains: a forward, losses, and a checkpoint folder.

Shapes: B sequences, T positions, N depths, F feature width, V vocabulary, W drafted vocabulary (V, or the most frequent
few tokens).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.config import TrainedConfig
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.targets.token_ids import Ways, ways
from draftsmith.types import DraftsmithError, TargetFacts

if TYPE_CHECKING:
    from draftsmith.targets import Target


class TrainableModel(ABC, nn.Module):
    """Weights that learn to guess ahead. Most families draft with the same object, see `TrainableDrafter`."""

    taps: tuple[int, ...]
    """The hidden states of the target from which it learns, see `Drafter.taps`."""
    d2t: Tensor | None
    """The ids of the tokens that are scored (W), or None if all are."""
    family_name: str
    config: TrainedConfig
    """The config from which it was made."""
    weights_file: str = "model.safetensors"
    tensor_prefix: str = ""
    """The prefix of tensor names in the published checkpoints."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict, at every depth d, the token d + 1 after `tokens_BT[:, t]`.

        `features_BTF[:, t]` predicted `tokens_BT[:, t]`. Entry d of the result is (B, T - d, V): at position t it has
        read features[t] and tokens[t .. t + d], and predicts tokens[t + d + 1].
        """

    @abstractmethod
    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of every depth, loss_N, and the share of right first guesses, accuracy_N.

        Training minimises the sum of the losses, in which each depth counts `config.decay` times as much as the one
        before.
        """

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the object of config.json, in the published layout if the family has one."""

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

        They are passed because in some families only they tell the drafted vocabulary, or a size. DraftsmithError for a
        config that lacks something, or a drafter that does not fit the target.
        """

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The depth of the deepest draft that it learns to make."""

    @abstractmethod
    def for_decoding(self, target: "Target") -> Drafter:
        """Return a copy that drafts for this target. Only the original can be trained or saved."""

    def check_savable(self) -> None:
        """Raise DraftsmithError if the weights are no longer those that were trained."""
        return

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices between hidden states, which some optimizers treat differently from tables and norms."""
        return []

    def published_name(self, name: str) -> str:
        """Return the name of a `state_dict` tensor in the checkpoint."""
        return self.tensor_prefix + name

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point everything that is borrowed from the target at it; most families borrow nothing."""
        return

    def limit_vocabulary(self, draft_tokens: Tensor | None) -> None:
        """Register the drafted vocabulary: as many token ids as the config says, or None (all tokens) if it says 0."""
        size = self.config.draft_vocab_size
        if (draft_tokens is None) != (size == 0) or (draft_tokens is not None and draft_tokens.shape != (size,)):
            raise DraftsmithError(f"draft_vocab_size is {size}, so exactly that many draft tokens have to be given.")
        self.register_buffer("d2t", None if draft_tokens is None else draft_tokens.to(torch.int64).clone())
        if draft_tokens is None:
            return
        if len(draft_tokens.unique()) != size:
            raise DraftsmithError("the draft vocabulary lists a token twice; list each once.")
        if not 0 <= int(draft_tokens.min()) <= int(draft_tokens.max()) < self.vocab_size:
            raise DraftsmithError(
                f"the draft vocabulary names a token outside the {self.vocab_size} of the target; fix its d2t."
            )

    def to_vocabulary(self, scores: Tensor) -> Tensor:
        """Spread scores (…, W) over the whole vocabulary (…, V); tokens that are never drafted get -inf."""
        if self.d2t is None:
            return scores
        whole = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy(-1, self.d2t, scores)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def write_files(
        self, folder: Path, facts: TargetFacts, extra: Mapping[str, Any] | None = None, repeat_tied: bool = True
    ) -> None:
        """Write config.json and the weights; keys that only Draftsmith uses go under `draftsmith`.

        With `repeat_tied`, a tied tensor is written under each of its names, as some readers expect; else only once.
        """
        self.check_savable()
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
        """Return these tensors as the checkpoint holds them, by published names; `load_published` undoes it."""
        return tensors

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in; a tied tensor may be stored under one of its names or under all of them."""
        wanted = self.state_dict()
        twins: dict[int, list[str]] = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            twins.setdefault(id(tensor), []).append(name)
        known = {self.published_name(name): name for name in wanted}
        unknown = tensors.keys() - known.keys()
        if unknown:
            raise DraftsmithError(f"{origin} has a tensor {min(unknown)!r} that is not in its config.json; fix that.")
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
        """Read a published checkpoint or our own; `target` is checked against it, and lends what it borrows.

        Args:
            dtype: of the weights; None keeps the file's.
        Raises:
            DraftsmithError: missing, damaged or foreign files, pickles, a model's own code, or another target.
        """
        folder = Path(folder)
        storage.require_folder(folder)
        config = storage.read_config(folder)
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
        """Return what has to agree so that weights can be taken over from another drafter, by the recipe's names."""
        return self.config.shapes()

    @torch.no_grad()
    def start_from(self, folder: Path, target: "Target") -> None:
        """Take over the weights of a checkpoint of the same shape; a full vocabulary may be limited on the way.

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
        """Return a copy that scores only these tokens (W); DraftsmithError if the family cannot."""
        raise DraftsmithError(
            f"{self.family_name} that scores all tokens cannot be cut down to {len(draft_tokens)}; set "
            "drafter.draft_vocab_size to 0."
        )


def check_target(origin: Path, made_for: Mapping[str, Any], facts: TargetFacts) -> None:
    """Refuse a target that differs in width, vocabulary or tokenizer from the one the checkpoint was made for.

    Args:
        made_for: `hidden_size`, `vocab_size`, `tokenizer_hash`, `name` and `fingerprint`, as far as they are known.
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
    # Unlike for the others, None is a statement here: the weights are as their makers left them.
    own = made_for.get("fingerprint", facts.fingerprint)
    if own != facts.fingerprint:
        raise DraftsmithError(
            f"{drafts} with {_weights(own)}, but {facts.name!r} has {_weights(facts.fingerprint)}; load the target it "
            "was trained with, or train a drafter for this one."
        )


def other_tokens(origin: Path, made_for: Mapping[str, Any], target: "Target") -> str | None:
    """Describe how the target's tokens of a text or a conversation differ from those in training; None if they agree.

    The text stays right, so this is no refusal; but the drafter meets tokens it never saw, and guesses worse.

    Args:
        made_for: the facts recorded with the drafter; facts that are not known are None.
    """
    now, name = ways(target.tokenizer), repr(target.name)
    known = Ways(*(made_for.get(field) for field in Ways._fields))
    if known.opening is not None and now.opening is not None and tuple(known.opening) != now.opening:
        said = f"texts that begin with {_tokens(known.opening)}, but {name} now begins them with {_tokens(now.opening)}"
    elif None not in (known.text_hash, now.text_hash) and known.text_hash != now.text_hash:
        said = f"other tokens of the same text than the tokenizer of {name} makes now"
    elif None not in (known.template_hash, now.template_hash) and known.template_hash != now.template_hash:
        said = f"another chat template than {name} has now"
    else:
        return None
    return (
        f"{origin} was trained on {said}, so it guesses worse than it could; give {name} the tokenizer files that it "
        "was trained with, or train it again."
    )


def other_weights(origin: Path, made_for: Mapping[str, Any], facts: TargetFacts) -> str | None:
    """Return a sentence if the drafter was trained for other weights than the target's, and both are known.

    The text stays right, so this is no refusal; but the drafter learnt to guess what another model says.

    Args:
        made_for: as in `check_target`, with `weights_hash` if it is known.
    """
    own = made_for.get("weights_hash")
    if None in (own, facts.weights_hash) or own == facts.weights_hash:
        return None
    name = f"{facts.name!r}" + (" of the same name" if made_for.get("name") == facts.name else "")
    return (
        f"{origin} was trained for other weights than {name} has here, so it guesses worse than it could; load the "
        "target it was trained for, or train it for this one (drafter.init_from takes its weights along)."
    )


def _tokens(opening: Sequence[int]) -> str:
    return f"the tokens {list(opening)}" if opening else "no special token"


def _weights(fingerprint: str | None) -> str:
    return "unchanged weights" if fingerprint is None else f"weights changed in training ({fingerprint[:12]})"
