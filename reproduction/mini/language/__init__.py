"""Procedural texts of the mini suite's language models, their tokenizers, and the pre-training of
their bases.
"""
