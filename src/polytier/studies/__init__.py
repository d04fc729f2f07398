"""Several runs: comparisons, searches, reproductions, measurements."""
