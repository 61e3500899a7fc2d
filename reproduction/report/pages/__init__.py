"""What only one page of the book needs."""
