"""Which documents are held out: decided by the text alone, so no list has to travel with the data."""

import hashlib

HELD_OUT_EVERY = 50


def is_held_out(text: str, every: int = HELD_OUT_EVERY) -> bool:
    """Say whether a document belongs to the held-out split: one in `every`, by the SHA-256 of its UTF-8 bytes."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % every == 0
