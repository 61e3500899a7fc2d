"""Measures of a model: zero-shot and text accuracy, and agreement with experts."""
