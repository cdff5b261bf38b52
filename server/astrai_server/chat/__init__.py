"""A chat with any OpenAI-compatible server: ``astrai chat``. Nothing here needs torch or a model."""
