"""The kinds of tokenizers and chat templates that `parity.py` goes through."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

MARKED = PLAIN.replace("{{ message['content'] }}{% if", "{% if").replace(
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}",
)
"""The same with the assistant's words marked."""

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"

SPECIAL = [UNKNOWN, BEGIN, END]

VOCABULARY = 700


def trained(tokenizer: Tokenizer, trainer: Any, texts: list[str], **more: Any) -> Tokenizer:
    """Train a tokenizer on some texts."""
    tokenizer.train_from_iterator(
        texts, trainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False, **more)
    )
    return tokenizer


def with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Add a token for every byte, for characters that it does not know."""
    whole, names = json.loads(tokenizer.to_str()), [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = whole["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary.update({name: len(vocabulary) + place for place, name in enumerate(names)})
    else:
        vocabulary += [[name, -20.0] for name in names]
    whole["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(whole))


def opened(tokenizer: Tokenizer, form: str) -> Tokenizer:
    """Put special tokens around every text, such as "<s> $A"."""
    names = [name for name in form.split() if name in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
    )
    return tokenizer


def sentence_piece(texts: list[str]) -> Tokenizer:
    """As Llama 2 has it: a space belongs to the word behind it, one stands before every text and is not shown."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    # Words alone to learn merges from; a whole text is one word to this tokenizer, as to Llama 2's.
    words = [f"▁{word}" for text in texts for word in text.split()]
    tokenizer = with_bytes(trained(tokenizer, trainers.BpeTrainer, words, limit_alphabet=100))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return opened(tokenizer, f"{BEGIN} $A")


def unigram(texts: list[str]) -> Tokenizer:
    """SentencePiece's other model, as Metaspace writes it: a space before the first word of a text only."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = with_bytes(trained(tokenizer, trainers.UnigramTrainer, texts, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return opened(tokenizer, f"{BEGIN} $A")


def byte_level(texts: list[str]) -> Tokenizer:
    """As GPT-2 and Qwen have it, without a token before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(
        tokenizer, trainers.BpeTrainer, texts, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )


def word_piece(texts: list[str]) -> Tokenizer:
    """As BERT has it: spaces are not kept."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return trained(tokenizer, trainers.WordPieceTrainer, texts, limit_alphabet=120)


def wrapped(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    """Return it as transformers has it."""
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END,
        clean_up_tokenization_spaces=False,
    )
    found.chat_template = template
    return found


Build = Callable[[list[str]], Tokenizer]

KINDS: dict[str, tuple[Build, str]] = {
    "SentencePiece BPE, BOS": (sentence_piece, PLAIN),
    "SentencePiece Unigram, BOS": (unigram, MARKED),
    "byte-level BPE": (byte_level, PLAIN),
    "byte-level BPE, BOS": (lambda texts: opened(byte_level(texts), f"{BEGIN} $A"), MARKED),
    "WordPiece, [CLS]": (lambda texts: opened(word_piece(texts), f"{BEGIN} $A"), PLAIN),
    "WordPiece, [CLS] and [SEP]": (lambda texts: opened(word_piece(texts), f"{BEGIN} $A {END}"), MARKED),
}
