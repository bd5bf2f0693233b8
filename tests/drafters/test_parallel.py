"""Drafters that guess all depths at once: how their drafts grow, and one that attends to the text as block drafters do.

Shapes: B rows, T positions, P positions that are drafted from, D depths, S committed entries, Q = P × D queries, F
width of states, G key/value heads, W head width (of logits: vocabulary), A all heads' widths, N nodes, M = N + 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.drafters.attention.decoder_layer import DecoderLayer, Rotary, attend_with_path
from draftsmith.drafters.attention.layer_sizes import LayerSizes
from draftsmith.drafters.attention.row_cache import RowCache, attached
from draftsmith.drafters.config import TrainedConfig
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.parallel import ParallelDrafter
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Target
from draftsmith.types import Context
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target


class Block(ParallelDrafter):
    """One pass of an attending layer over [root + mask 0, root + mask 1, …], which see each other and the text.

    The form of DFlash (arXiv:2602.06036) with one layer: the target's states are keys and values, never queries.
    """

    taps = (-1,)
    reads_prompt = True
    family_name = "a block drafter"

    def __init__(self, depth: int = 3) -> None:
        super().__init__(TrainedConfig(hidden_size=WIDTH, vocab_size=VOCABULARY))
        self.depth = depth
        self.layer_sizes = LayerSizes(
            hidden_size=WIDTH, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rms_norm_eps=1e-6, rope_parameters={"rope_theta": 100.0},
        )
        self.layer = DecoderLayer(self.layer_sizes, WIDTH)
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.masks = nn.Embedding(depth, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._rotary = Rotary(self.layer_sizes)
        self._memory: RowCache | None = None

    def attach(self, cache: KVCache, plan: Plan) -> None:
        self._memory = RowCache(self.layer_sizes, cache, self.emb.weight)

    def reset_rows(self, rows: list[int]) -> None:
        attached(self._memory).forget(rows)

    def block(
        self, roots_BP: Tensor, places_BP: Tensor, keys_BSGW: Tensor, values_BSGW: Tensor, mask_BPS: Tensor | None
    ) -> Tensor:
        """Score (B, P, D, W) the blocks behind these roots, whose entries have these places."""
        attention, depths = self.layer.self_attn, self.depth
        x_BPDF = self.emb(roots_BP).unsqueeze(2) + self.masks.weight
        places_BPD = places_BP.unsqueeze(2) + torch.arange(1, depths + 1)
        cos, sin = self._rotary.tables(int(places_BPD.max()) + 1, x_BPDF.dtype, x_BPDF.device)
        q, k, v = attention.turn(
            attention.project(x_BPDF), cos[places_BPD].unsqueeze(3), sin[places_BPD].unsqueeze(3)
        )
        mask_BQS = None if mask_BPS is None else mask_BPS.repeat_interleave(depths, dim=1)
        attended_BQA = attend_with_path(
            q.flatten(1, 2), keys_BSGW, values_BSGW, mask_BQS,
            k.repeat_interleave(depths, dim=1), v.repeat_interleave(depths, dim=1),
        )
        logits: Tensor = self.head(self.layer.finish(attended_BQA, x_BPDF.flatten(1, 2)))
        return logits.unflatten(1, (-1, depths))

    def guess(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Tensor:
        memory = attached(self._memory)
        new = memory.lay_out(context)
        inputs_NF = new.features_NF.to(self.emb.weight.dtype)
        _, keys_BSGW, values_BSGW = memory.store(new, self.layer.self_attn, self._rotary, inputs_NF)
        return self.block(root_B.unsqueeze(1), new.last_B1, keys_BSGW, values_BSGW, new.mask_B1S)[:, 0]

    def guess_at(self, tokens_BT: Tensor, features_BTF: Tensor, positions_BP: Tensor) -> Tensor:
        attention, length = self.layer.self_attn, tokens_BT.shape[1]
        heads = attention.project(features_BTF.to(self.emb.weight.dtype))
        cos_PW, sin_PW = self._rotary.tables(length, heads.dtype, heads.device)
        _, k_BTGW, v_BTGW = attention.turn(heads, cos_PW[:length].unsqueeze(1), sin_PW[:length].unsqueeze(1))
        mask_BPT = torch.arange(length) <= positions_BP.unsqueeze(2)
        return self.block(tokens_BT.gather(1, positions_BP), positions_BP, k_BTGW, v_BTGW, mask_BPT)

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def vocab_size(self) -> int:
        return VOCABULARY

    def default_plan(self) -> Plan:
        return Plan((1,) * self.depth)

    def describe(self) -> dict[str, Any]:
        return {"model_type": "block", "depth": self.depth}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "block"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: Target | None, tensors: Mapping[str, Tensor]
    ) -> "Block":
        return cls(config["depth"])


def make(dtype: torch.dtype = torch.float64) -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Block().to(dtype).eval()


def context(rows: int, tokens: int = 5) -> Context:
    """Return what fresh rows of different lengths bring."""
    generator = torch.Generator().manual_seed(rows)
    counts_B = torch.arange(tokens, tokens - rows, -1)
    return Context(
        torch.randint(0, VOCABULARY, (rows, tokens), generator=generator),
        torch.randn((rows, tokens, WIDTH), generator=generator, dtype=torch.float64),
        counts_B, counts_B + 1, torch.arange(rows), torch.ones(rows), torch.arange(rows),
    )


def test_a_block_drafter_with_a_memory_passes_what_all_families_pass():
    drafter = make().requires_grad_(False)
    plans = [
        None, Plan((3, 2, 1)), Plan((4, 3, 2), nodes=9, beam=3), Plan((2, 2, 2), paths=3), Plan((1, 1), sampled=True),
        Plan((2, 2), sampled=True), Plan(choices=((0,), (1,), (0, 0), (0, 2), (0, 0, 1))),
    ]
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), plans=plans)
    check_forward_agreement(drafter, tiny_target())


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_draft_is_the_product_of_the_depths(rows: int):
    """Every node has the children that its row's scores name, and a sampled draft hands over their softmax."""
    drafter, seen, cache = make(), context(rows), tiny_target().new_cache(rows, 32)
    drafter.attach(cache, Plan((3, 2)))
    logits_BDW = drafter.guess(seen, *seen.root())
    drafter.attach(cache, Plan((3, 2)))
    greedy = replace(seen, temperature_B=torch.zeros_like(seen.temperature_B))
    draft = drafter.propose(greedy, Plan((3, 2)))
    for b in range(rows):
        under: dict[int, set[int]] = {}
        for token, parent in zip(draft.tokens_BN[b].tolist(), draft.parents_BN[b].tolist(), strict=True):
            under.setdefault(parent, set()).add(token)
        first = under.pop(-1)
        assert first == set(logits_BDW[b, 0].topk(3).indices.tolist())
        assert list(under.values()) == [set(logits_BDW[b, 1].topk(2).indices.tolist())] * 3
    drafter.attach(cache, Plan((3, 2), sampled=True))
    drawn = drafter.propose(seen, Plan((3, 2), sampled=True))
    assert drawn.q_BMV is not None
    q_BDW = logits_BDW.softmax(-1, dtype=drawn.q_BMV.dtype)
    torch.testing.assert_close(drawn.q_BMV[:, 0], q_BDW[:, 0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(drawn.q_BMV[:, 1:4], q_BDW[:, 1:2].expand(-1, 3, -1), rtol=1e-5, atol=1e-7)


def test_steps_that_draft_nothing_are_read_all_the_same():
    """`follow`, which the base inherits, stores what a draft would have stored."""
    drafter, seen = make().requires_grad_(False), context(2)
    whole = drafter.guess_at(seen.tokens_BT, seen.features_BTF, torch.tensor([[4], [3]]))[:, 0]
    counts_B = torch.tensor([3, 2])
    early = seen.after(seen.tokens_BT, seen.features_BTF, counts_B, counts_B + 1)
    rest = torch.stack([torch.arange(3, 5), torch.arange(2, 4)])
    features = seen.features_BTF[torch.arange(2).unsqueeze(1), rest]
    late = seen.after(seen.tokens_BT.gather(1, rest), features, torch.tensor([2, 2]), seen.lengths_B)
    drafter.attach(tiny_target().new_cache(2, 32), Plan((1,)))
    drafter.follow(early)
    torch.testing.assert_close(drafter.guess(late, *late.root()), whole)


def test_the_losses_of_the_base_are_the_cross_entropies_and_teach():
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    features_BTF = torch.randn((2, 12, WIDTH), generator=generator)
    drafter, positions_BP = make(torch.float32), torch.tensor([[0, 3, 8], [1, 2, 7]])
    examples = TrainingBatch(tokens_BT, features_BTF, positions_BP)
    losses_D, accuracy_D = drafter.losses(examples)
    logits = drafter(tokens_BT, features_BTF)
    for depth in range(3):
        chosen_BPW = logits[depth][torch.arange(2).unsqueeze(1), positions_BP]
        labels_BP = tokens_BT.gather(1, positions_BP + depth + 1)
        expected = nn.functional.cross_entropy(chosen_BPW.flatten(0, 1), labels_BP.flatten())
        torch.testing.assert_close(losses_D[depth], expected)
        assert accuracy_D[depth] == (chosen_BPW.argmax(-1) == labels_BP).float().mean()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        drafter.losses(examples)[0].sum().backward()
        optimizer.step()
    found_D, accuracy_D = drafter.losses(examples)
    assert found_D.sum() < 0.1 * losses_D.sum() and accuracy_D.tolist() == [1.0] * 3


def test_a_checkpoint_comes_back(tmp_path: Path):
    drafter = make(torch.float32)
    drafter.save_pretrained(tmp_path / "saved", tiny_target().facts())
    back = Block.from_pretrained(tmp_path / "saved", tiny_target())
    tensors = back.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in drafter.state_dict().items())
