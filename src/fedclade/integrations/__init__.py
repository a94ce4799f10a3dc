"""Integrations with other frameworks: Flower, TensorBoard."""
