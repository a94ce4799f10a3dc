"""Engines run programs on clients. They know programs, never methods."""
