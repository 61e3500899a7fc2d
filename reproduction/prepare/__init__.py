"""A suite's settings, the paper's data sets, and how models, data and experts are prepared."""
