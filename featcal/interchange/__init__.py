"""Models in the form of other libraries: open_clip's checkpoints to transformers' CLIPModel and
back.
"""
