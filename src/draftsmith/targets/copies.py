"""Copies of a target in fewer bits, made directly from its weights; the memory they need is computed beforehand."""

import copy
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from draftsmith.native.layers import PackedEmbedding, PackedExperts, PackedLayer
from draftsmith.native.packing import choice_for, left_over, packables
from draftsmith.system import bytes_in_words, free_memory
from draftsmith.types import DraftsmithError, Quantization

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

MOST_LEFT = 0.05
"""Share of the weights that may stay unquantised; routers and convolutions beside a layer's matrices stay below it."""
BITS = {"none": 16, "int8": 8, "int4": 4}
progress = logging.getLogger("draftsmith.progress")


def bytes_by_place(model: nn.Module) -> dict[int, int]:
    """Return the sizes of a model's tensors by start address, so that a tensor of several modules counts once."""
    return {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.nbytes}


def copy_of(target: "Target", quantize: Quantization, name: str) -> PreTrainedModel:
    """Return a bf16 model whose layers are still to be packed from the target's weights; it shares everything else.

    Its linear layers have sizes but no weights. The memory that the copy needs is logged before it is taken.

    Args:
        name: what to call the copy in that message.

    Raises:
        DraftsmithError: there is not enough memory.
    """
    shell = _blank(target.model)
    refuse_left_over(shell, target.name, name)
    needed = memory_beside(target, shell, quantize)
    taken, beside = bytes_in_words(needed), bytes_in_words(sum(bytes_by_place(target.model).values()))
    sentence = (
        f"{name}: a copy of {_short(target.weights)} weights in {BITS[quantize]} bits takes {taken} beside the "
        f"target's {beside}"
    )
    free = free_memory()
    if free is not None and needed > free:
        raise DraftsmithError(
            f"{sentence}, and {bytes_in_words(free)} are free; end other programs, grant this one more memory, or "
            "choose a drafter that takes less, such as ngram."
        )
    progress.info("%s.", sentence)
    shell.load_state_dict(_rest(target, shell), strict=False, assign=True)
    shell.tie_weights()
    take_unstored(shell, target.model)
    return shell


def take_unstored(model: nn.Module, origin: nn.Module) -> None:
    """Give a copy the numbers of its origin that no checkpoint stores, in fp32 or wider.

    These are the frequencies of rotary positions above all. A model that was cast as a whole (`model.to(bfloat16)`) has
    rounded ones, and reads its cached keys by them; a copy that is built anew would have others.
    """
    stored, held = model.state_dict().keys(), dict(origin.named_buffers())
    for name, buffer in list(model.named_buffers()):
        own = held.get(name)
        if name in stored or own is None or own.shape != buffer.shape or not own.is_floating_point():
            continue
        place, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(place), leaf, own.to(torch.promote_types(buffer.dtype, torch.float32)))


def refuse_left_over(model: PreTrainedModel, name: str, what: str) -> None:
    """Raise DraftsmithError, naming the parts, if more than a small share of the weights would stay unquantised.

    For models that also see or hear, only the part that reads text counts.

    Args:
        model: its layers are not packed yet; their weights are not looked at.
        what: what the user asked for, such as "int4-self".
    """
    left, packed = left_over(model.get_decoder())
    share = left.total() / (left.total() + packed)
    if share > MOST_LEFT:
        kind, _ = left.most_common(1)[0]
        raise DraftsmithError(
            f"{what}: {name} ({model.config.model_type}) has {share:.0%} of its layers' weights in {kind}, which "
            "cannot be packed; leave it out."
        )


def memory_beside(target: "Target", shell: PreTrainedModel, quantize: Quantization) -> int:
    """Return the bytes that a quantised copy needs beyond what it shares with the target, from its tensors' sizes.

    Args:
        shell: the copy, without weights.
    """
    choice = choice_for(shell.get_output_embeddings(), shell.get_input_embeddings(), quantize)
    packed = sum(one.new_bytes() for one in packables(shell, choice, target.model).values())
    stored = shell.state_dict().keys()
    own = sum(buffer.nbytes for name, buffer in shell.named_buffers() if name not in stored)
    cast = 0
    if target.dtype != torch.bfloat16:
        parameters = dict(shell.named_parameters())
        cast = sum(parameters[name].nbytes for name in _names_of_rest(target, shell) if name in parameters)
    return packed + own + cast


def _blank(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same kind whose parameters are bf16 on the meta device: sizes without memory."""
    # The model is built anew, because a copy of the modules would keep hooks and packed weights of the target.
    with no_init_weights():
        shell = type(model)(copy.deepcopy(model.config))
    shell.tie_weights()
    blank: dict[int, nn.Parameter] = {}
    for module in shell.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            sizes = torch.empty(parameter.shape, dtype=torch.bfloat16, device="meta")
            shared = blank.setdefault(id(parameter), nn.Parameter(sizes, requires_grad=False))
            module.register_parameter(name, shared)
    return shell


def _rest(target: "Target", shell: PreTrainedModel) -> dict[str, Tensor]:
    """Return the part of the target's state that no packed layer will hold: its own tensors, or bf16 casts."""
    names = _names_of_rest(target, shell)
    if target.dtype == torch.bfloat16:
        return names
    parameters = dict(shell.named_parameters())
    return {name: tensor.bfloat16() if name in parameters else tensor for name, tensor in names.items()}


def _names_of_rest(target: "Target", shell: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the target's state, by name, that the copy also has: those that the target holds unpacked.

    If the target has another dtype, they are only those that the copy will not pack either, because they must be cast.
    """
    work = packables(shell, lambda _: "none", target.model)
    embedding, head = shell.get_input_embeddings(), shell.get_output_embeddings()
    goes = type(embedding) is nn.Embedding and head is not None and embedding.weight is head.weight
    state: dict[str, Tensor] = {}
    for name, module in target.model.named_modules():
        if isinstance(module, (PackedLayer, PackedExperts, PackedEmbedding)):
            continue
        if target.dtype != torch.bfloat16 and (name in work or (goes and shell.get_submodule(name) is embedding)):
            continue
        module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state


def _short(count: int) -> str:
    return f"{count / 1e6:,.0f} M" if count >= 10**7 else f"{count:,}"
