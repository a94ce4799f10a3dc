"""Experiments: configuration, rounds, evaluation, run directories. The only part beside `data` and `report` that touches disk."""
