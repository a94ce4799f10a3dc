"""What runs on a client: programs as folds over its batches, the plan of those batches, the model and its loss as pure functions."""
