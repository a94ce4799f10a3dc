"""After and around runs: comparisons, diagnosis, reports, export."""
