"""Core types: programs, batching, randomness, the functional model, the federation interface."""
