"""Analysis of data and runs: comparison, diagnosis, report, export."""
