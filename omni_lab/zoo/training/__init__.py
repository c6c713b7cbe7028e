"""How the checkpoint `voice` is made: from a teacher's speech to a whole Qwen3-Omni (docs/voice.md)."""
