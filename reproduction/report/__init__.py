"""What the book's pages are made of: results, the paper's values, claims, tables and figures. Knows
no torch.
"""
