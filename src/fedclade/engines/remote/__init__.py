"""Clients on other machines: messages, membership, nodes."""
