"""Irregular static trees: what a plan makes of them, how they are drafted, and that the text stays the target's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.cli.plans import check_prunable, read_drafts, read_shape
from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle_config import EagleConfig
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.heads.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.lookup.ngram import NgramConfig, make_ngram
from draftsmith.drafters.static_tree import static_tree
from draftsmith.drafters.tree_choices import EAGLE_TREE, MEDUSA_TREE, plan_of, pruned
from draftsmith.engine import Engine
from draftsmith.evaluation.grid import plan_for
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import ROOT, Context, DraftsmithError, SamplingParams
from tests.drafters.test_grow import RandomDrafter, V, context_of
from tests.engine.test_plans import (
    ALPHA,
    DRAWS,
    LENGTH,
    TOP_K,
    KnowingDrafter,
    distribution_after,
    mlp_speculator,
    oracle,
)
from tests.helpers.contract import check_drafter, contract_prompts
from tests.helpers.tiny import VOCABULARY, prompts, tiny_model, tiny_target
from tests.helpers.toy import chi_square_p_value

CHOICES = ((1,), (0,), (0, 0), (0, 2), (0, 0, 0), (1, 1), (0, 2, 0), (4,))
PLAN = Plan(choices=CHOICES)


def random_weights(drafter: Drafter, architecture: str) -> Drafter:
    """Draw weights in float64: untrained ones would all say the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in drafter.double().parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind(tiny_target(architecture))
    return drafter.eval()


def medusa(architecture: str = "llama") -> Drafter:
    return random_weights(MedusaDrafter.new(MedusaConfig(), tiny_target(architecture), None), architecture)


def eagle(architecture: str = "llama") -> Drafter:
    return random_weights(Eagle.new(EagleConfig(), tiny_target(architecture), None), architecture)


def test_a_plan_of_choices_knows_its_size():
    assert PLAN.depth == 3 and PLAN.max_nodes == len(CHOICES) and PLAN.branching == (5, 3, 1)
    assert PLAN.choices == tuple(sorted(CHOICES)) and Plan(choices=CHOICES[::-1]) == PLAN
    assert PLAN.shortened(1) == Plan(choices=((0,), (1,), (4,)))
    assert PLAN.shortened(0) == Plan() and Plan((3, 2), paths=2).shortened(1) == Plan((3,), paths=2)
    assert PLAN.ranked() == Plan((5, 3, 1), beam=5)
    assert Plan(choices=((0,), (0, 0))) == Plan((1, 1)) == Plan((1, 1, 1), nodes=2, paths=3, beam=1)
    assert Plan((1, 1)).is_chain and not any(plan.is_chain for plan in (Plan(), Plan((2, 1), nodes=2), PLAN))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((0, 0),), r"the choice \[0, 0\] hangs in the air, because \[0\] is missing"),
        (((0,), (0, 1, 0)), r"\[0, 1, 0\] hangs in the air, because \[0, 1\] is missing"),
        (((0,), (1,), (0,)), r"the choice \[0\] is given twice"),
        (((0,), ()), r"the choice \[\] is no list of ranks"),
        (((0,), (-1,)), r"the choice \[-1\] is no list of ranks"),
    ],
)
def test_broken_trees_are_refused(choices: tuple, message: str):
    with pytest.raises(DraftsmithError, match=message):
        Plan(choices=choices)


@pytest.mark.parametrize("rule", [{"paths": 2}, {"nodes": 2}, {"beam": 2}, {"sampled": True}], ids=str)
def test_choices_go_with_no_other_choice_of_nodes(rule: dict):
    with pytest.raises(DraftsmithError, match="choices name every node"):
        Plan(choices=CHOICES, **rule)
    with pytest.raises(DraftsmithError, match=r"branching is \(2, 2\), but the choices make it \(5, 3, 1\)"):
        Plan((2, 2), choices=CHOICES)


def test_the_published_trees():
    """Their sizes and a digest of each, as counted by hand in the authors' files; each a tree as it stands."""
    eagle_plan, medusa_plan = Plan(choices=EAGLE_TREE), Plan(choices=MEDUSA_TREE)
    assert (eagle_plan.max_nodes, eagle_plan.branching) == (25, (4, 3, 3, 3, 2))
    assert (medusa_plan.max_nodes, medusa_plan.branching) == (63, (10, 10, 10, 2))
    assert [sum(len(path) == d for path in EAGLE_TREE) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    assert [sum(len(path) == d for path in MEDUSA_TREE) for d in range(1, 5)] == [10, 28, 23, 2]
    assert MEDUSA_TREE[:6] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0)) and MEDUSA_TREE[-1] == (0, 7, 0)


def test_a_pruned_tree_is_a_tree_of_the_lowest_ranks():
    for nodes in range(1, 26):
        plan = Plan(choices=pruned(EAGLE_TREE, nodes))
        assert plan.max_nodes == nodes
    fourteen = pruned(EAGLE_TREE, 14)
    assert set(fourteen) <= set(EAGLE_TREE) and max(map(len, fourteen)) == 4 and (3,) not in fourteen


def test_defaults_are_the_published_trees_as_far_as_they_can_be_made():
    assert eagle().default_plan() == Plan(choices=EAGLE_TREE)
    assert medusa().default_plan() == Plan(choices=MEDUSA_TREE)
    assert plan_of(MEDUSA_TREE, 2, 3).branching == (3, 3)
    assert plan_of(EAGLE_TREE, 1, 2) == Plan(choices=((0,), (1,)))


@pytest.mark.parametrize("choices", [CHOICES, EAGLE_TREE[:20], ((0,), (0, 0), (0, 0, 0)), ((3,),)], ids=len)
def test_every_node_is_the_guess_of_its_ranks(choices: tuple):
    """Against the drafter's own numbers, node by node."""
    drafter, context, plan, nodes = RandomDrafter(), context_of(7), Plan(choices=choices), sorted(choices)
    draft = drafter.propose(context, plan)
    assert draft.tokens_BN.shape == (7, len(choices)) and draft.depth == plan.depth and draft.q_BMV is None
    roots = context.root()[0].tolist()
    for row in range(7):
        texts: dict[tuple[int, ...], list[int]] = {(): [roots[row]]}
        for node, parent in enumerate(draft.parents_BN[row].tolist()):
            path = nodes[node]
            assert (nodes[parent] if parent != ROOT else ()) == path[:-1]
            values = drafter.after(row, texts[path[:-1]])
            guess = sorted(range(V), key=values.__getitem__, reverse=True)[path[-1]]
            assert draft.tokens_BN[row, node] == guess
            texts[path] = [*texts[path[:-1]], guess]


def test_the_likeliest_path_lies_in_front():
    parents = static_tree(Plan(choices=EAGLE_TREE).choices, torch.device("cpu")).parents_N.tolist()
    assert parents[:5] == [ROOT, 0, 1, 2, 3]
    assert all(parent < node for node, parent in enumerate(parents))


class FromTheHost(TorchDispatchMode):
    """Counts the tensors that are made of Python numbers, each a transfer where the drafter is on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_the_tables_go_to_the_device_once():
    drafter, context, plan = medusa(), context_of(3), Plan(choices=MEDUSA_TREE[:31])
    features_BTF = torch.randn(*context.tokens_BT.shape, 32, dtype=torch.float64)
    transfers = []
    for _ in range(2):
        with FromTheHost() as seen:
            drafter.propose(replace(context, features_BTF=features_BTF), plan)
        transfers.append(seen.count)
    assert transfers[0] > 0 and transfers[1] == 0


def test_ranks_beyond_the_vocabulary_are_refused():
    with pytest.raises(DraftsmithError, match=f"asks for the {V + 1} best guesses, but the drafter scores {V} "):
        RandomDrafter().propose(context_of(1), Plan(choices=((0,), (V,))))
    with pytest.raises(DraftsmithError, match="drafts 5 tokens ahead, but the drafter 'drafter' reaches 4"):
        Engine(tiny_target(), medusa()).generate([[1, 2]], SamplingParams(max_tokens=9), Plan(choices=EAGLE_TREE))


def test_too_many_nodes_are_refused():
    with pytest.raises(DraftsmithError, match="the plan drafts 256 nodes, but there is room for 255"):
        Engine(tiny_target(), medusa()).generate(
            [[1, 2]], SamplingParams(max_tokens=9), Plan(choices=tuple((n,) for n in range(256)))
        )


FAMILIES: dict[str, Callable[[str], Drafter]] = {"medusa": medusa, "eagle": eagle}


@pytest.mark.parametrize(
    ("family", "architecture"), [("medusa", "llama"), ("medusa", "gpt2"), ("eagle", "llama"), ("eagle", "mixtral")]
)
def test_contract(family: str, architecture: str):
    drafter = FAMILIES[family](architecture)
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), [None, PLAN])


@pytest.mark.parametrize("make", [mlp_speculator, oracle, lambda: make_ngram(NgramConfig(), tiny_target(), None)])
def test_families_without_trees_of_their_own_keep_the_contract(make: Callable[[], Drafter]):
    """N-grams keep to the widths and the number of nodes."""
    drafter = make()
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), [PLAN])


def test_a_native_target_falls_back_from_the_native_speculator():
    from draftsmith.targets import Target

    target = Target(tiny_model(dtype=torch.bfloat16))
    drafter = mlp_speculator().bfloat16().for_decoding(target)
    plain = [c.tokens for c in Engine(target).generate(prompts(3), SamplingParams(max_tokens=9))]
    found = Engine(target, drafter, plan=PLAN).generate(prompts(3), SamplingParams(max_tokens=9))
    assert [c.tokens for c in found] == plain and all(c.statistics.drafted for c in found)


def test_drafting_compiles_without_a_break():
    drafter, context = medusa(), context_of(3)
    seen = Context(
        context.tokens_BT, torch.randn(3, context.tokens_BT.shape[1], 32, dtype=torch.float64), context.counts_B,
        context.lengths_B, context.rows_B, context.temperature_B, context.seeds_B,
    )
    compiled = torch.compile(lambda c: drafter.propose(c, PLAN).tokens_BN, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seen), drafter.propose(seen, PLAN).tokens_BN)


def test_a_recorded_step_gives_the_same_text():
    rules = SamplingParams(max_tokens=12)
    plain = [c.tokens for c in Engine(tiny_target()).generate(prompts(3), rules)]
    engine = Engine(tiny_target(), medusa(), plan=PLAN, compile="trace")
    assert [c.tokens for c in engine.generate(prompts(3), rules)] == plain


def test_the_engine_samples_the_targets_distribution():
    """The joint distribution of four tokens behind one prompt at temperature 1."""
    [question] = contract_prompts()[:1]
    target = tiny_target()
    exact, log_p_XV, children_XV = distribution_after(target, question)
    errors_XV = torch.randn(log_p_XV.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafter = KnowingDrafter((log_p_XV.clamp(min=-6.0) + errors_XV).log_softmax(-1).float(), children_XV)
    rules = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=TOP_K, seed=5, n=DRAWS)
    engine = Engine(target, drafter, max_batch=2_500, max_length=40)
    plan = Plan(choices=((0,), (1,), (0, 0), (0, 1), (0, 0, 1), (1, 0)))
    found = engine.generate([question], rules, plan)
    cells = {text: i for i, text in enumerate(exact)}
    counts = torch.bincount(torch.tensor([cells[tuple(c.tokens)] for c in found]), minlength=len(cells))
    assert {length for c in found for length in c.accepted_lengths} == {0, 1, 2}
    assert {c.statistics.steps for c in found} == {1, 2, 3}
    assert chi_square_p_value(counts, torch.tensor(list(exact.values())) * DRAWS) > ALPHA


def test_the_command_line_reads_trees(tmp_path: Path):
    assert read_shape("4,2,1") == Plan((4, 2, 1)) and read_shape("eagle") == Plan(choices=EAGLE_TREE)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(CHOICES))
    assert read_drafts(str(file), None, Plan(acceptance="typical")).plan(Plan((1,))) == Plan(
        choices=CHOICES, acceptance="typical"
    )
    own = Plan(choices=MEDUSA_TREE)
    assert read_drafts(None, None, Plan(nodes=9)).plan(own) == Plan((10, 10, 10, 2), beam=10, nodes=9)
    assert read_drafts(None, None, Plan(sampled=True)).plan(own) == Plan((1, 1, 1, 1), sampled=True)
    typical = Plan(acceptance="typical")
    assert read_drafts(None, None, typical).plan(own) == Plan(choices=MEDUSA_TREE, acceptance="typical")
    assert plan_for(own, 4) == Plan((10, 10, 10, 2), paths=4, beam=10)
    assert plan_for(own, 16) == Plan((10, 10, 10, 2), paths=16, beam=16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no choices"), ("{}", "holds no choices"), ("[[0], 1]", "has 1 among its choices"),
        ('[["0"]]', r"has \['0'\] among its choices"), ("[[0], [1.5]]", r"has \[1.5\] among"), ("[[0]", "as JSON"),
        ("[[0, 0]]", "hangs in the air"), ("[[true]]", r"has \[True\] among"), ('"00"', "has '0' among"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: str, message: str):
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(DraftsmithError, match=message):
        read_shape(str(file))


def test_words_that_are_no_tree_are_refused(tmp_path: Path):
    with pytest.raises(DraftsmithError, match=r"--plan is 'eagel'; give .* a published tree \(eagle, medusa\)"):
        read_shape("eagel")
    with pytest.raises(DraftsmithError, match=r"nowhere\.json cannot be read as JSON"):
        read_shape(str(tmp_path / "nowhere.json"))
    with pytest.raises(DraftsmithError, match="--candidates keeps the likeliest paths .* --plan medusa names every"):
        read_drafts("medusa", 2, NO_DRAFT).plan(Plan((1,)))
    with pytest.raises(DraftsmithError, match="choices name every node"):
        read_drafts("medusa", None, Plan(nodes=4)).plan(Plan((1,)))
    check_prunable(Plan((4, 2)), "4,2")
    assert VOCABULARY > 10
