"""Many models as one tensor: rows, their gradients, and local solvers."""
