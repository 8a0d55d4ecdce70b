"""Checkpoints to INT4: stream, pack, verify and judge. `pageferry compress` is the command; see `cli.py`."""

# Raise when the same source and options would give other bytes: work of an older version is then not resumed.
FORMAT_VERSION = 1
