"""Commands that make several runs: comparisons, searches, reproductions and benchmarks."""
