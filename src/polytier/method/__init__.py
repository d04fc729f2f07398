"""The seam: what a method is, and what a tier's program is given."""
