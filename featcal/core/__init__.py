"""The method's mathematics on plain tensors, in the paper's letters.

One convention differs: the paper's features are columns (d, n), ours are rows (n, d). So its
G = X Xᵀ/n reads xᵀx/n here, its C = X_tgt X_calᵀ/n appears transposed, and weights keep the paper's
shape (outputs, inputs). Nothing here knows models, files or processes.
"""
