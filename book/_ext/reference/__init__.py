"""What the reference pages say, read from the sources: docstrings, the command line, params.yaml,
result files, errors.
"""
