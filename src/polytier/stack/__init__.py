"""Many models as one tensor: rows, gradients, local solvers."""
