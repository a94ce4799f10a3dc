"""Secure sums: the server learns the sum of vectors, and nothing else of a vector."""
