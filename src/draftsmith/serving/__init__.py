"""The HTTP server: speaks the APIs of OpenAI, Anthropic and vLLM, over one engine in one thread."""
