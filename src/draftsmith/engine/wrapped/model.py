"""A transformers model that decodes with drafts: `generate` with transformers' own arguments and outputs.

Shapes: B rows (every prompt as often as it is continued), T tokens of the padded prompts, N new tokens, V vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import NEEDS_NO_TRAINING, load_drafter
from draftsmith.engine.engine import Engine
from draftsmith.engine.requests.admission import SEED_STRIDE
from draftsmith.engine.requests.request import Request
from draftsmith.engine.wrapped.batch import Batch, logits_of, read_batch, scores_of, whole_rows
from draftsmith.engine.wrapped.rules import GenerateRules, read_rules, refusal
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.targets.attention import ATTENTION_NAME
from draftsmith.types import CompileLevel, DraftsmithError, Statistics


@dataclass
class Row:
    """A continuation, and where it ends by transformers' rules.

    Args:
        beginning: the prompt with its padding, in which transformers looks for stop strings too.
        end: how many of the request's tokens belong to the row; None while it goes on.
        looked: how many of these tokens were searched for stop strings.
    """

    request: Request
    beginning: list[int]
    end: int | None = None
    looked: int = 0

    def look(self, criteria: StopStringCriteria | None) -> None:
        """Find out whether it has ended."""
        request = self.request
        if request.error is not None:
            raise DraftsmithError(request.error)
        if self.end is not None:
            return
        while criteria is not None and self.end is None and self.looked < len(request.tokens):
            self.looked += 1
            newest = (self.beginning + request.tokens[: self.looked])[-criteria.maximum_token_len :]
            if bool(criteria(torch.tensor([newest]), None)):
                self.end = self.looked
        if self.end is None and request.finish_reason is not None:
            self.end = len(request.tokens)


class WrappedModel:
    """A causal LM whose `generate` drafts and verifies; made by `wrap`.

    Calls from several threads may overlap, and are then decoded together.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._target = engine.target
        self._lock = RLock()
        self._statistics = Statistics()

    @property
    def model(self) -> PreTrainedModel:
        """The model that was wrapped; read it, but do not call its own `generate`."""
        return self._target.model

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration."""
        config: PretrainedConfig = self.model.config
        return config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's settings for generating, the defaults of every call; they may be changed or replaced."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.model.generation_config = config

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._target.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return self._target.dtype

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that was handed to `wrap`."""
        return self._target.tokenizer

    @property
    def drafter(self) -> Drafter:
        """What guesses ahead."""
        return self._engine.drafter

    @property
    def engine(self) -> Engine:
        """The engine that decodes; its own calls must not run at the same time as `generate`."""
        return self._engine

    @property
    def statistics(self) -> Statistics:
        """What all calls so far cost and gained, added up: `tokens_per_step` says what drafting gains."""
        return self._statistics

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: PreTrainedModel | None = None,
        streamer: BaseStreamer | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: str | Callable[..., Any] | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Continue every prompt, with transformers' arguments, in its order, and with its defaults.

        Greedy text equals that of the model's own `generate`, token for token. Sampled text follows the same
        distribution, with other draws.

        Args:
            inputs, input_ids: prompts (batch, T), padded on the left; without any, a text begins with the BOS token.
            generation_config: overrides the model's own; further keywords override both.
            streamer: gets the prompts, then the tokens of all rows (B) place by place, then `end()`.
            attention_mask: zero at the padding.
            tokenizer: for `stop_strings`; the one given to `wrap` otherwise.
            seed: of the draws. Without it they follow PyTorch's global CPU generator, so calling `torch.manual_seed`
                first repeats a text. Every row gets a seed of its own.
            kwargs: settings of `GenerationConfig`.

        Returns:
            ids (B, T + N), on the device of the prompts; or, with `return_dict_in_generate`, transformers' output
            class, with `scores` and `logits` (N times (B, V), fp32) if asked for, which are zero after a row's end, and
            without `past_key_values`.

        Raises:
            DraftsmithError: for arguments that cannot be honoured, prompts that do not fit, padding that is not on
                the left, and a row for which the target has no finite logits.
        """
        for name, value in {
            "logits_processor": logits_processor or None, "stopping_criteria": stopping_criteria or None,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn, "synced_gpus": synced_gpus or None,
            "assistant_model": assistant_model, "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask, "custom_generate": custom_generate,
        }.items():
            if value is not None:
                raise refusal(name, value, "leave it out")
        if inputs is not None and input_ids is not None:
            raise DraftsmithError("inputs and input_ids are both given, and are the same thing; leave one of them out.")
        rules = read_rules(self.generation_config, generation_config, kwargs)
        batch = read_batch(input_ids if inputs is None else inputs, attention_mask, rules, self.device)
        criteria = self._stop_criteria(rules, tokenizer)
        requests = self._requests(batch, rules, seed)
        rows = [Row(request, ids) for request, ids in zip(requests, batch.ids_BT.tolist(), strict=True)]
        if streamer is not None:
            streamer.put(batch.ids_BT.cpu())
        columns = []
        with closing(self._decode(rows, criteria, rules)) as decoded:
            for column in decoded:
                columns.append(column)
                if streamer is not None:
                    streamer.put(torch.tensor(column, device="cpu"))
        if streamer is not None:
            streamer.end()
        ids = whole_rows(batch, columns)
        if not rules.returns_dict:
            return ids
        lengths = [row.end if row.end is not None and rules.eos else len(columns) for row in rows]
        logits = logits_of(requests, lengths, ids.device) if rules.wants_logits else None
        scores = scores_of(requests, lengths, rules.processors(), ids.device) if rules.wants_scores else None
        return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits)  # type: ignore[arg-type]

    def _stop_criteria(
        self, rules: GenerateRules, tokenizer: PreTrainedTokenizerBase | None
    ) -> StopStringCriteria | None:
        """Return transformers' own search for stop strings, so that it finds them at the same token."""
        if not rules.stop_strings:
            return None
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        if tokenizer is None:
            raise DraftsmithError("stop_strings need a tokenizer; give it to generate or to wrap.")
        try:
            return StopStringCriteria(tokenizer, list(rules.stop_strings))
        except ValueError as error:
            raise DraftsmithError(
                f"stop_strings is {list(rules.stop_strings)}, which no token of this tokenizer can end; use others."
            ) from error

    def _requests(self, batch: Batch, rules: GenerateRules, seed: int | None) -> list[Request]:
        """Return a request for every row; DraftsmithError for one that does not fit."""
        new_tokens = rules.new_tokens(batch.width, self._target.max_length)
        longest, most = max(map(len, batch.prompts)), self._engine.max_length
        if longest + new_tokens > most:
            raise DraftsmithError(
                f"the longest prompt has {longest} tokens and is to get {new_tokens} more, but there is room for "
                f"{most}; shorten it, lower max_new_tokens, or give wrap a larger max_length where the model has one."
            )
        if seed is not None and not (isinstance(seed, Integral) and 0 <= seed < 2**63):
            raise DraftsmithError(f"seed is {seed!r}; it must be a whole number between 0 and 2**63 - 1.")
        count = len(batch.prompts)
        if seed is not None:
            seeds = [(int(seed) + row * SEED_STRIDE) % 2**63 for row in range(count)]
        else:
            # Greedy rows draw nothing, and leave PyTorch's generator as it is.
            seeds = torch.randint(2**62, (count,), device="cpu").tolist() if rules.do_sample else [0] * count
        params = [rules.params(new_tokens, self._target.vocab_size, own) for own in seeds]
        requests = self._engine.admit_call(batch.prompts, params)
        for request in requests:
            request.keeps_logits = rules.returns_dict and (rules.wants_scores or rules.wants_logits)
        return requests

    def _decode(
        self, rows: Sequence[Row], criteria: StopStringCriteria | None, rules: GenerateRules
    ) -> Generator[list[int], None, None]:
        """Yield the tokens of all rows place by place, as soon as every row has a token there or has ended.

        After its end a row has padding. But without a known end token, transformers lets rows that met a stop string go
        on until the last row has met one, and so does this.
        """
        core = self._engine.core
        shown = 0
        try:
            with self._lock:
                for row in rows:
                    core.add(row.request)
            while True:
                with self._lock:
                    for row in rows:
                        row.look(criteria)
                        if row.end is not None and rules.eos:
                            core.abort(row.request.id)
                while any(row.end is None or row.end > shown for row in rows):
                    column = [_token_at(row, shown, rules) for row in rows]
                    if None in column:
                        break
                    shown += 1
                    yield [token for token in column if token is not None]
                if all(row.end is not None and row.end <= shown for row in rows):
                    return
                with self._lock:
                    # Another thread may have stepped for these rows meanwhile; one step too many does no harm.
                    if core.has_work:
                        core.step()
        finally:
            with self._lock:
                for row in rows:
                    core.abort(row.request.id)
                    if row.request.finish_reason is not None:
                        self._statistics += row.request.completion().statistics


def _token_at(row: Row, place: int, rules: GenerateRules) -> int | None:
    """Return a row's token at a place, the padding after its end, or None if there is no token yet."""
    if row.end is not None and place >= row.end and rules.eos:
        return rules.pad
    return row.request.tokens[place] if place < len(row.request.tokens) else None


def wrap(
    model: PreTrainedModel | Target,
    drafter: Drafter | str | Path | None = NEEDS_NO_TRAINING,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    plan: Plan | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    max_tokens_in_flight: int | None = None,
    draft_rows: int | None = None,
    compile: CompileLevel = "off",
) -> WrappedModel:
    """Give a loaded transformers model a `generate` that drafts, with the same arguments and outputs as before.

        fast = draftsmith.wrap(model, "path/to/speculator", tokenizer)
        ids = fast.generate(**tokenizer(["Once upon"], return_tensors="pt", padding=True), max_new_tokens=40)

    From then on the model's own `generate` and `forward` must not be used: it attends through Draftsmith's cache, and
    in bf16 on a CPU its weights are packed. Its configuration, device and weights can be read as before. If you need
    both, load the model a second time.

    Args:
        model: a causal LM; or a `Target`, which has options of its own, such as int8.
        drafter: a folder or hub name, a word such as `ngram:max_length=4`, or a drafter made for the target. Prompt
            lookup needs no training, hence the default; None is plain decoding.
        tokenizer: for drafters with another vocabulary and for stop strings; a `Target` has its own.
        plan, max_batch, max_length, max_tokens_in_flight, draft_rows, compile: see `Engine`. A batch of more rows
            than `max_batch` is decoded as rows become free.

    Raises:
        DraftsmithError: for a model that cannot be a target or was wrapped before, and a drafter that is not there or
            was made for another target.
    """
    if isinstance(model, Target):
        if tokenizer is not None and tokenizer is not model.tokenizer:
            raise DraftsmithError("the target has a tokenizer of its own; give the tokenizer to Target instead.")
        target = model
    elif model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME:
        raise DraftsmithError("this model is wrapped already; go on with that wrapper or its Target, or load it anew.")
    else:
        target = Target(model, tokenizer, model.config.name_or_path or model.config.model_type)
    guesser = load_drafter(drafter, target) if isinstance(drafter, (str, Path)) else drafter
    return WrappedModel(
        Engine(
            target, guesser, plan=plan, max_batch=max_batch, max_length=max_length,
            max_tokens_in_flight=max_tokens_in_flight, draft_rows=draft_rows, compile=compile,
        )
    )
