"""Federated learning with a model for every device, every team and the whole population."""
