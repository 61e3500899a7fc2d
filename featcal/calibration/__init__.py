"""Algorithm 1: the mathematics of core applied to the blocks of a model."""
