"""What a method is (`Algorithm`), and what the program of a tier is given (`Children`, `LocalProblem`)."""
