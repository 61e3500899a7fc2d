"""Merging methods, one file for the variants of one paper, loaded when a method is asked for."""
