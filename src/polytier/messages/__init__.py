"""What travels between nodes, and what it costs."""
