"""Fast gradient kernels for stacks of clients."""
