"""Data: sources, partitions over devices, teams, and the federation that training reads."""
