"""Files: run directories, checkpoints, safe reading, atomic writing."""
