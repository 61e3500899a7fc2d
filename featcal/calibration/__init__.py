"""Algorithm 1: joins the mathematics of core with the blocks of a model; knows no data sets."""
