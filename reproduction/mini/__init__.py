"""The embedded suite: twenty drawn tasks and two small CLIP models pre-trained on them, made from a
seed, offline.
"""
