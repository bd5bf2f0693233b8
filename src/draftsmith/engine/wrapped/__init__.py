"""The `generate` of transformers, with drafts."""
