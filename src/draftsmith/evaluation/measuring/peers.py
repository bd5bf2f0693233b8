"""Other decoders of the same model, to be measured in the same rounds as ours. Shapes: B rows, T tokens."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from draftsmith.dtypes import multiplies_bf16
from draftsmith.evaluation.bench import Peer
from draftsmith.targets import Target


def transformers_peer(
    name_or_path: str | Path, target: Target, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> Peer:
    """Load the target's weights once more for transformers' own greedy `generate`, in the same place.

    Args:
        dtype: by default the target's; where that is bf16 and PyTorch multiplies it slowly, fp32, which is faster.
    """
    if dtype is None:
        slow = target.dtype == torch.bfloat16 and not multiplies_bf16(target.device)
        dtype = torch.float32 if slow else target.dtype
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(name_or_path), dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    model = model.to(target.device).eval()
    # The count has to be exact, so the end token must not end anything.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    @torch.no_grad()
    def decode(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        prompt_BT = torch.tensor([list(prompt) for prompt in prompts], device=target.device)
        begun = time.perf_counter()
        out_BT = model.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=new_tokens, do_sample=False
        )
        tokens = out_BT[:, prompt_BT.shape[1] :].tolist()
        return tokens, time.perf_counter() - begun

    return decode
