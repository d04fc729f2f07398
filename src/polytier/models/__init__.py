"""What is learned: models, losses, metrics."""
