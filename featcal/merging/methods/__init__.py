"""Merging methods: a file has those that share code, and is loaded when one of them is asked for."""
