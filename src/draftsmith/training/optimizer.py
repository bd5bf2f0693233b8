"""The optimizers of a drafter: AdamW on everything, or Muon on the hidden matrices and AdamW on the rest."""

import torch

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.training.sections import OptimizerSection


def build_optimizers(drafter: TrainableModel, section: OptimizerSection) -> list[torch.optim.Optimizer]:
    """Return fresh optimizers; their learning rate is set before every step."""
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    matrices: list[torch.nn.Parameter] = []
    if section.name == "muon":
        matrices = drafter.hidden_matrices()
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=0.0, betas=section.betas, weight_decay=section.weight_decay, fused=True)
    ]
    if matrices:
        # Muon's updates are scaled to those of AdamW, so that both share one learning rate.
        optimizers.append(
            torch.optim.Muon(matrices, lr=0.0, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
