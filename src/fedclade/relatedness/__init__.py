"""Who belongs together, and how models are mixed: pure functions over arrays, which know neither clients nor engines."""
