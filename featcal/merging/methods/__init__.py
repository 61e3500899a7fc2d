"""Merging methods. A file holds methods that share code, and is loaded when one of them is used."""
