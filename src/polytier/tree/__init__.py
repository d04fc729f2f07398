"""The tree of nodes, participation, random numbers by key, and weights between clients."""
