"""A Flower federation on this machine: processes, certificates, supervisor."""
