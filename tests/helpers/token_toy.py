"""Targets with small tokenizers and chat templates, texts and conversations for them, and short runs on these."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

import draftsmith
from draftsmith.engine import Engine
from draftsmith.targets import Target
from draftsmith.training.data.loader import Loader
from draftsmith.training.data.windows import Window
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.types import SamplingParams
from draftsmith.workflows.training import Evaluation, TrainResult
from tests.helpers.tiny import tiny_model
from tests.helpers.tiny_tokenizers import CHAT, tiny_tokenizer_of

KINDS = ("llama", "metaspace-first", "byte-level", "word-piece")
"""Of SentencePiece's two ways, bytes, and WordPiece; all but the bytes put a BOS before a text."""
MARKING = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDING = MARKING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ONE_ONE = [{"role": "user", "content": "Who lives there?"}, {"role": "assistant", "content": "Nobody knew."}]
MESSAGES = [
    {"role": "system", "content": "Be kind."}, *ONE_ONE, {"role": "user", "content": "A light went on at night."},
    {"role": "assistant", "content": "What a strange house, said the girl."},
]
TEXTS = [
    "Once upon a time there was a small house at the end of the road.", "Nobody knew who lived there, but at night",
    "The houses of the village were older than the times that anybody could tell of. " * 2,
]


def tokenizer_of(kind: str, template: str | None = CHAT) -> PreTrainedTokenizerFast:
    known = tiny_tokenizer_of(kind)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known.backend_tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def target_of(kind: str, template: str | None = CHAT) -> Target:
    tokenizer = tokenizer_of(kind, template)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    model = tiny_model(dtype=torch.float32, vocabulary=len(tokenizer), eos_token_id=end)
    return Target(model, tokenizer, name=f"toy-{kind}")


def recipe_for(folder: Path, records: list[dict[str, Any]], *overrides: str) -> Recipe:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return build_recipe(
        {
            "drafter": {"n_predict": 2, "inner_dim": 32},
            "data": {"sources": [{"path": str(path)}], "shuffle_windows": 4, "held_out_every": 0},
            "stage1": {"steps": 40, "batch": 4, "length": 48, "rate": 0.01, "final_rate": 0.001},
            "stage2": {"steps": 40, "batch": 4, "prompt_tokens": 6, "new_tokens": 16, "epochs": 4, "temperature": 0,
                       "generate_batch": 4, "rate": 0.01, "final_rate": 0.001},
            "optimizer": {"precision": "fp32"},
            "output": {"folder": str(folder / "run"), "save_every": 20, "dtype": "fp32"},
        },
        list(overrides),
    )


def trained(
    folder: Path, kind: str, template: str, records: list[dict[str, Any]], *overrides: str,
    console: Console | None = None,
) -> TrainResult:
    target = target_of(kind, template)
    return draftsmith.train(
        recipe_for(folder, records, *overrides), target=target, console=console,
        evaluation=Evaluation(prompts=TEXTS, prompts_a_task=2, new_tokens=12, prompt_tokens=12),
    )


def save(target: Target, folder: Path, template: str | None = CHAT) -> Path:
    assert target.tokenizer is not None
    target.model.save_pretrained(folder)
    target.tokenizer.chat_template = template
    target.tokenizer.save_pretrained(folder)
    return folder


def served(target: Target, prompt: Any) -> list[int]:
    return Engine(target).generate([prompt], SamplingParams(max_tokens=1))[0].prompt_tokens


def take(reader: Loader, count: int) -> list[Window]:
    return [reader.next_window() for _ in range(count)]
