"""Differential privacy of training, and secure sums."""
