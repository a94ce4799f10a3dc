"""Several simulators side by side: each has a shard of the clients."""
