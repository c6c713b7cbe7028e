"""The OpenAI-compatible server over a pipeline (docs/serving.md)."""
