"""Studies: one file each, with its settings, its models and what is recorded of them."""
