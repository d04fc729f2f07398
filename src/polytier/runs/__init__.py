"""One run: its settings, its loop, its folder and its result."""
