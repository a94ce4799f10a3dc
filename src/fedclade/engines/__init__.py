"""Engines run programs on clients. They depend on programs, never on methods."""
