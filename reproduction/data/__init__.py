"""The paper's data sets: where they lie, their prompts and class names, damaged images, decoded
images on disk.
"""
