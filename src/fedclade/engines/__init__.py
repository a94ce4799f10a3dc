"""Engines: how the clients are run. They know programs, never methods."""
