"""One module for each kind of page of the book."""
