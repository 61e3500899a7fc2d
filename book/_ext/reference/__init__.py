"""Text of the reference pages, read from docstrings, commands, params.yaml, results and errors."""
