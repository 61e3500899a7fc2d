"""What the book's pages are made of: results, printed values, claims, figures; knows no torch."""
