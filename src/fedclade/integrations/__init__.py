"""Other frameworks: Flower, TensorBoard."""
