"""The operation that turns the products of a target's output projection into its logits.

Most models use the products as they are. Some scale them (Cohere multiplies by `logit_scale`, Granite divides by
`logits_scaling`), some cap them (Gemma's `final_logit_softcapping`). This changes distributions, but no ranking, so
code that scores with the target's projection has to do the same.

Shapes: T tokens, F width of the states, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

SCALES = ("logit_scale", "logits_scaling")
CAP = "final_logit_softcapping"
PROBED_TOKENS = 8


@dataclass(frozen=True)
class LogitForm:
    """logits = cap · tanh(scale · product / cap), or scale · product without a cap."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the products are the logits."""
        return self.scale == 1 and self.cap is None

    def __call__(self, products: Tensor) -> Tensor:
        """Turn products (…, V) into logits."""
        scaled = products if self.scale == 1 else products * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def scaled(self, weight_VF: Tensor) -> Tensor:
        """Return the projection multiplied by the scale; a cap cannot be included."""
        return weight_VF if self.scale == 1 else weight_VF * self.scale


@torch.no_grad()
def logit_form(target: "Target") -> LogitForm:
    """Return the form that a target's config specifies.

    Models differ in whether they multiply or divide by a scale, and some ignore the key. So if there is a key, a few
    tokens are read, and the form that comes nearest to the model's own logits is taken.
    """
    numbers = [float(number) for key in SCALES if (number := getattr(target.config, key, None))]
    scales = [1.0, *(scale for number in numbers for scale in (number, 1 / number) if scale != 1)]
    cap = getattr(target.config, CAP, None)
    forms = [LogitForm(scale, one) for scale in scales for one in ((None, float(cap)) if cap else (None,))]
    if len(forms) == 1:
        return forms[0]
    count = min(PROBED_TOKENS, target.max_length)
    tokens_1T = torch.arange(1, count + 1, device=target.device).unsqueeze(0) * (target.vocab_size // (count + 1))
    states_1TF, logits_1TV = target.encode(tokens_1T, (-1,), logits=True, by_model=True)
    assert logits_1TV is not None
    products_1TV = target.model.get_output_embeddings()(states_1TF).float()
    distances = [(form(products_1TV) - logits_1TV.float()).norm().item() for form in forms]
    return forms[distances.index(min(distances))]
