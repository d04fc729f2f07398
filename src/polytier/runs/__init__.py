"""One run: its settings, the loop, its folder, its result."""
