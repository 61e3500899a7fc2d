"""Algorithm 1: joins the mathematics of core with the blocks of a model. Knows no data sets and no
metrics.
"""
