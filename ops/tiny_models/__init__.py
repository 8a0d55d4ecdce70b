"""Tiny random checkpoints of every model family the service knows, for tests; see `ops.tiny_models.build`."""
