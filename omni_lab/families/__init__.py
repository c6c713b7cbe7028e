"""Model families: how each maps to a stage graph."""
