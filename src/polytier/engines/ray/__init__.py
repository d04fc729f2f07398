"""The engine for a cluster: sub-trees in actors of Ray."""
