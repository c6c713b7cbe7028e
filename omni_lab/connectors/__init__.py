"""Channels between two ends of an edge: `send(message)` on one, `receive() -> [messages]` on the other."""
