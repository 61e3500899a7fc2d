"""What is known of transformers: which blocks a model has, what reaches them, and how one block is
run again.
"""
