"""The HTTP side: OpenAI-shaped routes over one bridge to the engine."""
