"""Models by name, losses and metrics."""
