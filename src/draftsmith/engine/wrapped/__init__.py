"""The `generate` of transformers, with drafting."""
