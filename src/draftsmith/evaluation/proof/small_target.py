"""A target of eight tokens whose texts can be enumerated, and drafters for it, decoded by the real engine step.

On a real vocabulary a joint distribution has far too many outcomes to draw them all. Here it has 8³, so that a million
draws find a shift of less than one percent in total variation. Shapes: V alphabet, R rows.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.family import Family
from draftsmith.drafters.grow import grow
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, DraftsmithError

ALPHABET = 8
PROMPT = (1, 5, 2)
CONTEXT = 64
WIDTH = 16
LOGIT_SPREAD = 1.4
STAND_IN = "a stand-in drafter (the target's own next-token table with noise)"


def small_target(alphabet: int = ALPHABET, seed: int = 0) -> Target:
    """Build a random Llama of two layers in float64 whose next-token distributions are neither flat nor sharp."""
    config = LlamaConfig(
        vocab_size=alphabet, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.5)
    model = model.double().eval()
    target = Target(model, name=f"random Llama of {alphabet} tokens", native=False)
    _, logits_BTV = target.encode(torch.arange(alphabet).unsqueeze(1), logits=True)
    assert logits_BTV is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(LOGIT_SPREAD / float(logits_BTV.std()))
    return target


class TableDrafter(StagewiseDrafter):
    """Guesses from a table of log q by the last token (V, V): the target's own after one token, with noise."""

    taps = ()

    def __init__(self, target: Target, noise: float = 0.7, seed: int = 1) -> None:
        _, logits_VTV = target.encode(torch.arange(target.vocab_size).unsqueeze(1), logits=True)
        assert logits_VTV is not None
        logits_VV = logits_VTV[:, 0].double()
        error_VV = torch.randn(logits_VV.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.log_q_VV = (logits_VV + noise * error_VV).log_softmax(-1).float()

    @property
    def max_depth(self) -> int:
        """No limit but the context."""
        return CONTEXT

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        """Start from the root alone."""
        root_B, _ = context.root()
        return root_B, root_B

    def step(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Look the last token up."""
        return self.log_q_VV[tokens_R], tokens_R

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Grow whatever the plan asks for."""
        return grow(self, context, plan)

    def default_plan(self) -> Plan:
        """Two guesses."""
        return Plan((1, 1))


def small_drafter(target: Target, family: Family | None, least_depth: int = 2) -> tuple[Drafter, str]:
    """Return a drafter for the small target, and a description of it.

    It is an untrained drafter of the user's family if that can be made so small, can sample and reaches `least_depth`;
    otherwise the stand-in.
    """
    if family is not None:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                made = family.make(family.config.read({}, family.name), target, None)
        except DraftsmithError:
            made = None
        if isinstance(made, TrainableDrafter):
            made = made.make_ready(target)
        if isinstance(made, StagewiseDrafter) and made.can_sample and made.max_depth >= least_depth:
            return made, f"an untrained drafter of the family {family.name}"
    return TableDrafter(target), STAND_IN
