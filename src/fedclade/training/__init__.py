"""Training runs: configuration, setup, round loop, evaluation, results."""
