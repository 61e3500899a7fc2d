"""Zero-shot heads and accuracies."""
