"""The HTTP server: what OpenAI's, Anthropic's and vLLM's clients speak, over one engine in one thread."""
