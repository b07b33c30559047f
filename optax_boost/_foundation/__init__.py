"""Arguments, trees, arrays and files: what every other room uses, and nothing of optimizers."""
