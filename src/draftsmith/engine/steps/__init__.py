"""One step of decoding and its parts: rows, prompts read, drafts laid out, tokens committed."""
