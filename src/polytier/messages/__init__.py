"""Messages between nodes: their encoding, what is done to an upload before it is sent, and the bytes they take."""
