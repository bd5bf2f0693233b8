"""The trained draft model: learns from training batches, is saved as a transformers folder, and drafts as any model
does.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.small_lm import SmallLM
from draftsmith.drafters.registry import family_named, load_drafter
from draftsmith.drafters.trainable import storage
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers import training_toy as toy
from tests.helpers.contract import check_drafter
from tests.helpers.tiny import WIDTH, tiny_model, tiny_target


def make(**options: object) -> SmallLM:
    family = family_named("small-lm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = family.make(family.config.read(options, ""), tiny_target(), None)
    assert isinstance(made, SmallLM)
    return made.double()


def test_it_drafts_what_forward_predicts():
    trained_model, question = make(guesses=3), [5, 9, 2, 40, 7]
    trained_model.lm.lm_head.weight.data.normal_(0, 0.5)
    engine = Engine(tiny_target(), trained_model.for_decoding(tiny_target()), plan=Plan((1, 1, 1)))
    (completion,) = engine.generate([question], SamplingParams(max_tokens=12))
    text, at = question + completion.tokens, len(question)
    for accepted in completion.accepted_lengths:
        # The root is text[at]; what forward says behind it, fed its own guesses, is accepted as far as it is true.
        own = text[: at + 1]
        while len(own) - at - 1 < 3:
            own = [*own, int(trained_model.logits(torch.tensor([own]))[0, -1].argmax())]
        right = [g == t for g, t in zip(own[at + 1 :], text[at + 1 :], strict=False)]
        assert accepted == [*right, False].index(False)
        at += accepted + 1


def test_contract():
    trained_model = make(width=16, layers=2, guesses=3)
    check_drafter(lambda: trained_model.for_decoding(tiny_target("gpt2")), tiny_target("gpt2"), tiny_model("gpt2"))


def test_trains_resumes_and_is_a_transformers_folder(tmp_path: Path):
    data = toy.write_data(tmp_path)
    options = ("drafter={family: small-lm, width: 16, guesses: 2}", "stage1.steps=30", "stage2.steps=4")
    result = toy.run(tmp_path / "run", data, *options)
    records = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[29] < 0.8 * losses[0]
    drafter = load_drafter(result.drafter, toy.target())
    assert isinstance(drafter, DraftModel) and drafter.default_plan() == Plan((1, 1))
    theirs = AutoModelForCausalLM.from_pretrained(result.drafter)
    ours = SmallLM.from_pretrained(result.drafter, toy.target())
    tokens_BT = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(theirs(tokens_BT).logits, ours.lm.float()(tokens_BT).logits)
    assert ours.max_depth == 2, "it trains on as it was trained"


def test_how_many_tokens_it_drafts_is_kept(tmp_path: Path):
    folder = tmp_path / "drafter"
    make(guesses=7).save_pretrained(folder, tiny_target().facts())
    assert load_drafter(folder, tiny_target()).default_plan() == Plan((1,) * 7)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("guesses") == 7
    (folder / storage.MANIFEST).unlink()  # the folder is as another program writes it
    path.write_text(json.dumps(config))
    assert load_drafter(folder, tiny_target()).default_plan() == Plan((1,) * 4)
    path.write_text(json.dumps({**config, "guesses": 999}))
    with pytest.raises(DraftsmithError, match=r"config.json: guesses is 999; use at most 128"):
        load_drafter(folder, tiny_target())


def test_mistakes_are_named():
    with pytest.raises(DraftsmithError, match=r"drafter\.width is 130; use a multiple of 64"):
        make(width=130)
    family = family_named("small-lm")
    with pytest.raises(DraftsmithError, match="scores all tokens; set drafter.draft_vocab_size to 0"):
        family.make(family.config.read({}, ""), tiny_target(), torch.arange(4))
    with pytest.raises(DraftsmithError, match="'small-lm' has to be trained"):
        load_drafter("small-lm", tiny_target())
    assert make().lm.config.hidden_size == WIDTH
