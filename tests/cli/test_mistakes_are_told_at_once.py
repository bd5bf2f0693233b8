"""A mistake in an option, a name, a path or a key is told before PyTorch is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import assets

FAMILY, FOLDER = "did you mean", "does not exist"
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "version": (("--version",), ""),
    "help": (("generate", "--help"), ""),
    "families": (("families",), ""),
    "an option": (("generate", "hi", "--targt", "x"), "No such option"),
    "generate, target": (("generate", "hi", "--target", "./absent"), FOLDER),
    "generate, a folder without a model": (("generate", "hi", "--target", "empty"), "has no config.json"),
    "generate, nearly a target's name": (("generate", "hi", "--target", "my-modle"), "did you mean my-model?"),
    "generate, drafter": (("generate", "hi", "--drafter", "./absent"), FOLDER),
    "generate, no drafter in a folder": (("generate", "hi", "--drafter", "unknown"), "the drafter family 'odd'"),
    "generate, family": (("generate", "hi", "--drafter", "ngrm"), "did you mean ngram?"),
    "generate, option": (("generate", "hi", "--drafter", "ngram:max_lengt=3"), "did you mean ngram:max_length?"),
    "generate, inside a cascade": (("generate", "hi", "--drafter", "cascade:inner=ngrm"), "did you mean ngram?"),
    "generate, untrained": (("generate", "hi", "--drafter", "mlp"), "has to be trained"),
    "generate, a hub that does not answer": (("generate", "hi", "--target", "nobody/none"), "hub cannot be"),
    "generate, a drafter on one": (("generate", "hi", "--drafter", "nobody/none"), "hub cannot be"),
    "generate, prompt": (("generate", "--prompt-file", "absent.txt"), "absent.txt cannot be read"),
    "generate, plan": (("generate", "hi", "--plan", "medussa"), "medussa"),
    "generate, tree": (("generate", "hi", "--plan", "absent.json"), "absent.json cannot be read"),
    "generate, dtype": (("generate", "hi", "--dtype", "fp17"), "'fp17' is unknown"),
    "generate, device": (("generate", "hi", "--device", "gpu"), "'gpu' is unknown; use auto, cpu or cuda"),
    "generate, result": (("generate", "hi", "--json", "file/x.json"), "cannot be written"),
    "generate, a result in place of the text": (("generate", "hi", "--json", "-"), "give /dev/stdout"),
    "generate, a file as drafter": (("generate", "hi", "--drafter", "file"), "is a file, where a folder has to be"),
    "generate, no schema": (("generate", "hi", "--json-schema", "absent.json"), "absent.json', which cannot be read"),
    "generate, a schema": (("generate", "hi", "--json-schema", "my-model/config.json"), "which no text can be held to"),
    "generate, a pattern": (("generate", "hi", "--regex", "a{99999}"), "the most is 10000"),
    "generate, prediction": (("generate", "hi", "--prediction", "absent.txt"), "absent.txt', which cannot be read"),
    "serve, target": (("serve", "--target", "./absent"), FOLDER),
    "serve, drafter": (("serve", "--drafter", "ngrm"), "did you mean ngram?"),
    "serve, second drafter": (("serve", "--drafter", "ngram", "--drafter", "./absent"), FOLDER),
    "serve, plan": (("serve", "--plan", "medussa"), "medussa"),
    "serve, dtype": (("serve", "--dtype", "fp17"), "'fp17' is unknown"),
    "serve, device": (("serve", "--device", "gpu"), "'gpu' is unknown; use auto, cpu or cuda"),
    "serve, keys": (("serve", "--api-key-file", "absent"), "absent cannot be read"),
    "serve, a file without keys": (("serve", "--api-key-file", "file"), "holds none"),
    "serve, port": (("serve", "--port", "65536"), "--port is 65536"),
    "serve, waiting": (("serve", "--max-waiting", "-1"), "Error: --max-waiting is -1; give a finite number of 0"),
    "serve, no time": (("serve", "--request-timeout", "0"), "Error: --request-timeout is 0.0; give"),
    "serve, draining": (("serve", "--drain-seconds", "inf"), "Error: --drain-seconds is inf; give"),
    "serve, no body": (("serve", "--max-body-bytes", "0"), "Error: --max-body-bytes is 0; give"),
    "serve, no length": (("serve", "--max-length", "1"), "Error: --max-length is 1; a prompt and its text need"),
    "serve, rows": (("serve", "--plan", "2", "--draft-rows", "-1"), "Error: --draft-rows is -1; use 0"),
    "generate, rows": (("generate", "a", "--plan", "2", "--draft-rows", "-1"), "Error: --draft-rows is -1; use 0"),
    "generate, no drafts of a drafter": (("generate", "a", "--no-draft", "--drafter", "ngram"), "drafts nothing"),
    "generate, no drafts by a rule": (
        ("generate", "a", "--no-draft", "--acceptance", "typical", "--temperature", "1"), "leave out --acceptance, or"
    ),
    "generate, measuring for a given plan": (("generate", "a", "--remeasure", "--plan", "2"), "and --plan says it"),
    "generate, a plan without a drafter": (
        ("generate", "a", "--target", "my-model", "--plan", "2,1"), "--plan is about drafts, but"
    ),
    "generate, rows without a plan": (("generate", "a", "--draft-rows", "2"), "add --plan"),
    "generate, a drafter as target": (("generate", "a", "--target", "speculator"), "is a drafter of the family mlp"),
    "serve, a plan without a drafter": (("serve", "--target", "my-model", "--plan", "2,1"), "--plan is about drafts"),
    "generate, measuring for no drafts": (("generate", "a", "--remeasure", "--no-draft"), "leave out --remeasure, or"),
    "serve, measuring for a given plan": (("serve", "--remeasure", "--plan", "2"), "and --plan says it"),
    "bench, measuring for a given plan": (("bench", "--remeasure", "--candidates", "1"), "but the plan is given"),
    "serve, no drafts of a plan": (("serve", "--no-draft", "--plan", "4,2"), "--no-draft drafts nothing"),
    "bench, target": (("bench", "--target", "./absent"), FOLDER),
    "bench, drafter": (("bench", "--drafter", "eagel"), "did you mean eagle?"),
    "bench, texts": (("bench", "--data", "absent.jsonl"), "absent.jsonl cannot be read"),
    "bench, task": (("bench", "--task", "cod"), "choose one of code, dialogue, prose"),
    "bench, plan": (("bench", "--plan", "4;2"), "4;2"),
    "bench, peer": (("bench", "--peer", "vlm"), "known is transformers"),
    "bench, no rows": (("bench", "--batch", "0,2"), "batches is 0,2; give one or more numbers of at least 1"),
    "bench, numbers": (("bench", "--batch", "1,two"), "1,two"),
    "prove, target": (("prove", "--target", "./absent"), FOLDER),
    "prove, drafter": (("prove", "--drafter", "./absent"), FOLDER),
    "prove, prompts": (("prove", "--data", "absent.jsonl"), "absent.jsonl cannot be read"),
    "prove, numbers": (("prove", "--top-k", "1"), "top_k is 1"),
    "check, target": (("check", "--target", "./absent"), FOLDER),
    "check, drafter": (("check", "--drafter", "absent"), FOLDER),
    "check, a word": (("check", "--drafter", "ngram"), "'ngram' is not trained, so there is nothing to check"),
    "check, dtype": (("check", "--serving-dtype", "bf61"), "'bf61' is unknown"),
    "export, target": (("export", "--target", "./absent", "--drafter", "unknown", "--out", "x"), FOLDER),
    "export, drafter": (("export", "--drafter", "absent", "--out", "x"), FOLDER),
    "export, a word": (("export", "--drafter", "eagle", "--out", "x"), "'eagle' is a family of drafters"),
    "export, a lookup": (("export", "--drafter", "ngram", "--out", "x"), "so there is nothing to export"),
    "export, nowhere": (("export", "--drafter", "unknown"), "give --out, the folder to write"),
    "export, nothing": (("export", "--out", "x"), "give --drafter, the folder of a trained drafter"),
    "export, texts": (("export", "--drafter", "unknown", "--out", "x", "--task", "code"), "give --check too"),
    "export, python": (("export", "--drafter", "unknown", "--out", "x", "--check", "absent"), "absent does not exist"),
    "compare, family": (("compare", "--family", "mpl"), "did you mean mlp?"),
    "compare, option": (("compare", "--family", "mlp:n_predct=3"), "did you mean mlp:n_predict?"),
    "compare, drafter": (("compare", "--drafter", "absent"), FOLDER),
    "compare, data": (("compare", "--data", "absent.txt"), FOLDER),
    "compare, prompts": (("compare", "--prompts", "absent.txt"), "absent.txt cannot be read"),
    "train, recipe": (("train", "recip.yaml"), "did you mean recipe.yaml?"),
    "train, key in a recipe": (("train", "recipe.yaml"), "did you mean stage1.steps?"),
    "train, key": (("train", "stage2.stepz=3"), "did you mean stage2.steps?"),
    "train, section": (("train", "--target", "my-model", "stage3.steps=3"), "did you mean stage2?"),
    "train, value": (("train", "stage2.steps=few"), "give a whole number"),
    "train, option": (("train", "drafter.n_predct=3"), "n_predict?"),
    "train, family": (("train", "--family", "mpl"), "did you mean mlp?"),
    "train, untrained family": (("train", "--family", "ngram"), "needs no training"),
    "train, target": (("train", "--target", "my-modle"), "did you mean my-model?"),
    "train, data": (("train", "--data", "absent.txt"), FOLDER),
    "train, first weights": (("train", "--drafter", "absent"), FOLDER),
    "train, prompts": (("train", "--eval-data", "absent.txt"), "absent.txt cannot be read"),
    "train, minutes of a run that goes on": (("train", "--resume", "--minutes", "2"), "leave it out to go on"),
    "train, nothing to resume": (("train", "--resume"), "no checkpoint to resume from"),
    "train, minutes of the embedded run": (("train", "--minutes", "2"), "--target, --data or --family, or set stage1"),
    "train, folder with other files": (("train", "--out", "."), "has no run in it, but recipe.yaml, which a run would"),
    "train, no folder": (("train", "--out", ""), "--out is empty; name a folder"),
    "train, folder": (("train", "--out", "file/run"), "cannot write"),
    "train, folder of the system": (("train", "--out", "/proc/absent", "--dry-run"), "/proc/absent (/proc cannot be"),
    "train, all held out": (("train", "data.held_out_every=1"), "data.held_out_every cannot be used: 1 would hold out"),
    "train, texts to learn from": (("train", "stage2.texts=recipe.yaml"), "not what a run writes; give the generated"),
    "train, drafted tokens": (
        ("train", "--target", "my-model", "drafter.draft_vocab_size=99999"), "drafter.draft_vocab_size is 99999, more"
    ),
    "train, another encoding": (("train", "--target", "my-model", "--data", "wide.jsonl"), "is UTF-16 instead"),
    "train, columns": (("train", "--target", "my-model", "--data", "table.csv"), "with the columns body, source; name"),
    "train, threads": (("train", "--threads", "0"), "--threads is 0"),
    "doctor, result": (("doctor", "--json", "file/x.json"), "cannot be written"),
    "compare, no folder": (("compare", "--out", " "), "--out is empty; name a folder"),
    "demo, no folder": (("demo", "--out", ""), "--out is empty; name a folder"),
    "demo, target": (("demo", "--target", "./absent"), FOLDER),
    "demo, drafter": (("demo", "--drafter", "absent"), FOLDER),
    "load, address": (("load", "--base-url", "localhost:8000"), "give an address such as"),
    "load, prompts": (("load", "--dataset", "prosa"), "did you mean prose?"),
    "load, limit": (("load", "--goodput", "ttft:200", "topt:30"), "did you mean tpot?"),
    "load, clients": (("load", "--sweep", "1,128"), "too few for 128 at a time"),
    "load, no tokens": (("load", "--output-len", "-3"), "--output-len is -3; give numbers of tokens"),
    "load, no clients": (("load", "--sweep", "1,0"), "is 1,0; give --max-concurrency or --sweep numbers of at least 1"),
    "load, a gap": (("load", "--sweep", "1,,2"), "--sweep is '1,,2'; give whole numbers with commas, such as 1,2,4."),
    "load, a gap between percentiles": (("load", "--metric-percentiles", "50,,99"), "is '50,,99'; give numbers"),
    "load, a gap between metrics": (("load", "--percentile-metrics", "ttft,,itl"), "has '', which is no metric"),
    "bench, a gap": (("bench", "--batch", "1,2,"), "--batch is '1,2,'; give whole numbers"),
    "generate, a gap": (("generate", "a", "--plan", "2,,1"), "--plan is '2,,1'; give whole numbers"),
    "load, metric": (("load", "--percentile-metrics", "ttfl"), "did you mean ttft?"),
    "load, body": (("load", "--extra-body", "[]"), "give a JSON object"),
    "load, a word too many": (("load", "now"), "'now' belongs to no option"),
    "load, ramp": (("load", "--ramp-up-strategy", "linear"), "a ramp needs --ramp-up-start-rps"),
    "load, result": (("load", "--json", "file/x.json"), "cannot be written"),
    "load, results": (("load", "--compare", "absent.json", "absent.json"), "absent.json cannot be read"),
    "tune-layers, target": (("tune-layers", "--target", "./absent"), FOLDER),
    "tune-layers, prompts": (("tune-layers", "--data", "absent.txt"), "absent.txt cannot be read"),
    "tune-layers, folder": (("tune-layers", "--out", "unknown"), "holds something else"),
}
"""Words of a command line, and a part of what it says."""

LATIN, BROKEN, FIELDS = "is not UTF-8 text (byte 0xe9)", "line 2, is no JSON", "line 1, has neither"
BAD_DATA = {
    "latin.txt": ("caf\xe9\n".encode("latin-1"), LATIN),
    "latin.jsonl": ('{"text": "a"}\n{"text": "caf\xe9"}\n'.encode("latin-1"), LATIN),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', BROKEN),
    "fields.jsonl": (b'{"body": "a"}\n', FIELDS),
    "empty.txt": (b"", "empty.txt"),
    "empty.jsonl": (b"", "empty.jsonl"),
}
"""Files that hold nothing to train or measure on, and a part of what is said of them."""
READ = (
    "train --data", "train --eval-data", "compare --data", "compare --prompts", "bench --data", "prove --data",
    "check --data", "tune-layers --data",
)
CASES |= {
    f"{words} {name}": ((*words.split(), name, "--target", "my-model"), part)
    for words in READ for name, (_, part) in BAD_DATA.items()
}

RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from draftsmith.cli import app

told = {}
for name, words in json.load(sys.stdin).items():
    done = CliRunner().invoke(app, words)
    slow = sorted({"torch", "transformers", "numpy", "matplotlib"} & set(sys.modules))
    told[name] = [done.exit_code, " ".join((done.stdout if done.exit_code == 0 else done.stderr).split()), slow]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Make all mistakes in one process, and return what each said and which slow packages were imported by then."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "empty").mkdir()
    (place / "file").touch()
    (place / "recipe.yaml").write_text("stage1: {stepz: 3}\n")
    (place / "wide.jsonl").write_text('{"text": "a"}', encoding="utf-16")
    (place / "table.csv").write_text("body;source")
    for name, (content, _) in BAD_DATA.items():
        (place / name).write_bytes(content)
    (place / "my-model").symlink_to(assets.demo_target())
    (place / "speculator").symlink_to(assets.demo_drafter())
    (place / "unknown").mkdir()
    (place / "unknown" / "config.json").write_text(json.dumps({"model_type": "odd"}))
    before = sorted(place.rglob("*"))
    words = {name: words for name, (words, _) in CASES.items()}
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")} | nobody
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(words), cwd=place, capture_output=True, text=True, check=True,
        env=environment,
    )
    assert sorted(place.rglob("*")) == before, "a mistake leaves nothing behind"
    found: dict[str, tuple[int, str, list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_slow_package_is_imported_for_a_mistake(name: str, told: dict[str, tuple[int, str, list[str]]]):
    code, sentence, slow = told[name]
    assert not slow, "imported by now; the first test that fails is to blame"
    expected = CASES[name][1]
    assert code == (2 if expected else 0), sentence
    assert expected.replace(" ", "") in sentence.replace(" ", ""), sentence


def test_every_command_is_there():
    commands = {path.stem.replace("_", "-") for path in (Path(__file__).parents[2] / "src/draftsmith/cli").glob("*.py")}
    helpers = {"--init--", "app", "common", "demo-report", "guidance", "load-tables", "plans", "progress", "statistics"}
    assert commands - helpers <= {words[0] for words, _ in CASES.values()}
