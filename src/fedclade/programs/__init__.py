"""Client programs: local training, evaluation, model selection, signatures."""
