"""Data: sources, partitions over devices, teams, and the federation that training reads."""

IGNORED = -100  # the target at a position without a token, which counts in no loss or metric
