"""Small tokenizers of every kind that joins tokens in its own way, trained here on a few lines of text."""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "Once upon a time there was a small house at the end of the road. Nobody knew who lived there, but at night "
    "a light went on. \"What a strange house,\" said the girl; she wouldn't go in. Un café, s'il vous plaît! "
    "The houses of the village were older than the times that anybody could tell of.\n"
)
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Return a trained tokenizer with a token for every byte in its vocabulary."""
    whole = json.loads(tokenizer.to_str())
    vocabulary = whole["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary.update({name: len(vocabulary) + place for place, name in enumerate(BYTES)})
    else:
        vocabulary += [[name, -20.0] for name in BYTES]
    whole["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(whole))


def _add_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def _llama() -> Tokenizer:
    """As Llama-2 has it: every space is a part of the word behind it, and the text's first one is not shown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = [f"▁{word}" for word in TEXT.split()]
    tokenizer.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    tokenizer = _with_bytes(tokenizer)
    _add_bos(tokenizer)
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    tokenizer = _with_bytes(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    _add_bos(tokenizer)
    return tokenizer


def _unigram(scheme: str, with_bytes: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if with_bytes:
        tokenizer = _with_bytes(tokenizer)
    metaspace = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if with_bytes else metaspace
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    _add_bos(tokenizer)
    return tokenizer


def _word_ends() -> Tokenizer:
    """As the first GPT has it: the space is written behind a word, but not behind the last one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


_BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "llama": _llama,
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-first": lambda: _metaspace("first"),
    "unigram-always": lambda: _unigram("always", with_bytes=False),
    "unigram-bytes": lambda: _unigram("first", with_bytes=True),
    "word-piece": _word_piece,
    "word-ends": _word_ends,
}
KINDS = tuple(_BUILDERS)
WITH_BYTES = ("byte-level", "llama", "metaspace-always", "metaspace-first", "unigram-bytes")
"""Those that can write every character."""


@cache
def tiny_tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer with one more special token, `<pad>`, and an added word that is not special."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_BUILDERS[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer
