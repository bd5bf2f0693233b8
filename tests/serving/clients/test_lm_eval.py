"""lm-eval's model for completions: scores of continuations and greedy texts, with the target's own tokenizer."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.clients.conftest import MODEL, PROMPTS, PYTHON, TARGET, Server, client

lm_eval = client("lm_eval")
pytestmark = pytest.mark.slow
PAIRS = (
    ("def main():", "\n    return 0"), ("It is a truth universally", " acknowledged, that"), ("1 2 3 4", " 5 6 7"),
    ("Once upon a time", " there was a king"), ("", "Hello"),
)
SCORES = """
import json, sys, torch
from transformers import AutoModelForCausalLM
asked = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
told = []
for context, continuation in asked:
    with torch.no_grad():
        rows = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    told.append([rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(-1) == wanted).all())])
print(json.dumps(told))
"""


def model(server: Server, **more: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    options = {"tokenizer_backend": "huggingface", "tokenizer": str(TARGET), "num_concurrent": 4, **more}
    return LocalCompletionsAPI(base_url=f"{server.address}/v1/completions", model=MODEL, max_length=512, **options)


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_scores_are_those_of_transformers(server: Server):
    client = model(server)
    told = client.loglikelihood(asked("loglikelihood", list(PAIRS)))
    tokens = []
    for context, continuation in PAIRS:
        pair = client._encode_pair(context, continuation) if context else (
            [client.prefix_token_id], client.tok_encode(continuation)
        )
        tokens.append([list(part) for part in pair])
    done = subprocess.run(
        [PYTHON, "-c", SCORES, str(TARGET)], input=json.dumps(tokens), capture_output=True, text=True, check=True
    )
    own = json.loads(done.stdout.splitlines()[-1])
    for (score, greedy), (own_score, own_greedy) in zip(told, own, strict=True):
        assert score == pytest.approx(own_score, abs=1e-3) and greedy == own_greedy


def test_greedy_texts_are_those_of_plain_decoding(server: Server):
    options = {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0}
    told = model(server).generate_until(asked("generate_until", [(prompt, dict(options)) for prompt in PROMPTS]))
    assert told == [server.completed(prompt, 32, stop=["\n\n"]) for prompt in PROMPTS]


def test_a_task_from_a_file(server: Server, tmp_path: Path):
    """Multiple choice and perplexity, as tasks are made of them: the whole path through lm-eval."""
    lines = [
        {"question": context, "right": continuation, "wrong": " zq zq zq"} for context, continuation in PAIRS if context
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"data_files": {"test": str(tmp_path / "data.jsonl")}}
    task = {
        "task": "ours", "dataset_path": "json", "dataset_kwargs": files,
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "target_delimiter": "",
        "doc_to_choice": "{{[right, wrong]}}", "doc_to_target": 0, "metric_list": [{"metric": "acc"}],
    }
    told = lm_eval.simple_evaluate(model=model(server), tasks=[task], bootstrap_iters=0)
    assert told["results"]["ours"]["acc,none"] == 1.0
