"""How files are written, read and locked: complete or not at all, checked, and by one writer at a time."""
