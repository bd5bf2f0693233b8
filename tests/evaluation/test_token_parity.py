"""Over kinds of tokenizers: what is accepted in training is accepted in serving, and `check` finds other tokens."""

import json
from itertools import takewhile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.evaluation.checking.check import check_tokens
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.targets.records import Completion
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.batches import draw, prepare
from draftsmith.training.data.reader import Reader
from draftsmith.training.data.sources import Piece
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.sections import DistillationSection
from draftsmith.types import SamplingParams
from tests.helpers.tiny_tokenizers import CHAT
from tests.helpers.token_toy import ENDING, KINDS, MARKING, MESSAGES, TEXTS, save, target_of, trained

FEW = ("metaspace-first", "byte-level")
"""One kind of tokenizer that puts a BOS before a text, and one that does not."""


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_acceptance_in_training_is_acceptance_in_serving(kind: str, tmp_path: Path):
    """Step by step, in float64: the engine on texts and messages, and the training forward on what stage 2 makes."""
    # So few texts are learnt by heart.
    completions = [Completion(text, " Nobody knew.") for text in TEXTS[:2]]
    records = [{"messages": MESSAGES[:3]}, *(vars(completion) for completion in completions)]
    result = trained(tmp_path, kind, MARKING, records, "stage1.steps=0", "stage2.steps=120")
    narrow = target_of(kind, MARKING)
    target = Target(narrow.model.double(), narrow.tokenizer, narrow.name)
    drafter = load_drafter(result.training.folder / "latest", target)
    assert isinstance(drafter, TrainableDrafter)
    depth, params = drafter.max_depth, SamplingParams(max_tokens=16)
    asked = [*TEXTS[:2], MESSAGES[:2]]
    served = Engine(target, drafter, plan=Plan((1,) * depth), max_batch=3).generate(asked, params)
    assert sum(done.statistics.accepted for done in served) > sum(done.statistics.steps for done in served) / 2

    reader, documents = Reader.of(target, "assistant"), [*completions, Conversation(MESSAGES[:3])]
    prompts = [reader.prompt(Piece(document), 6, 1000, lambda _: 0) for document in documents]
    written = [done.tokens for done in Engine(target).generate(prompts, params)]
    windows = [
        Window(prompt + tokens, [(len(prompt), len(prompt) + len(tokens))])
        for prompt, tokens in zip(prompts, written, strict=True)
    ]
    task = draw(collate(windows, 999, depth - 1), depth, None, ())
    examples = prepare(drafter, target, task, distillation=DistillationSection(), seed=())
    guesses = [logits_BTV.argmax(-1) for logits_BTV in drafter(examples.tokens_BT, examples.features_BTF)]
    for row, (window, done) in enumerate(zip(windows, served, strict=True)):
        assert window.tokens == done.prompt_tokens + done.tokens
        root, predicted = window.spans[0][0], []
        while root < len(window.tokens) - 1:
            # Guess d behind the root, which is position root - 1, is the token d + 1 further on; the last token of a
            # text is the target's own.
            behind = window.tokens[root + 1 : -1]
            hits = (int(guesses[d][row, root - 1]) == token for d, token in zip(range(depth), behind, strict=False))
            predicted.append(sum(1 for _ in takewhile(bool, hits)))
            root += predicted[-1] + 1
        assert predicted == done.accepted_lengths


def no_opening(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def opening(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT)


def other_bos(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<unk>"}))


@pytest.mark.parametrize("kind", KINDS)
def test_check_finds_every_change_of_the_tokens(kind: str, tmp_path: Path):
    target = target_of(kind, ENDING)
    drafter = MLPSpeculator(MLPConfig(n_predict=1, inner_dim=8).for_target(target))
    drafter.save_pretrained(tmp_path / "drafter", target.facts())
    save(target, tmp_path / "same", ENDING)
    assert check_tokens(tmp_path / "drafter", Target.from_pretrained(tmp_path / "same", dtype="fp32")).passed
    changes = (
        (opening if kind == "byte-level" else no_opening, "trained on texts that begin with"),
        (other_template, "trained on another chat template"),
        # The template stays, but writes another token where it writes bos_token.
        (other_bos, "trained on another chat template"),
    )
    for number, (change, words) in enumerate(changes):
        folder = save(target, tmp_path / str(number), ENDING)
        change(folder)
        found = check_tokens(tmp_path / "drafter", Target.from_pretrained(folder, dtype="fp32"))
        assert found.passed is False and words in found.detail, found.detail
