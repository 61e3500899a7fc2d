"""Make the book's pages from results, printed values, claims and figures, without torch."""
