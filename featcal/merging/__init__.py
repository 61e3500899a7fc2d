"""Merging: base and experts in, one model out."""
