"""What language models answer, and whether it is right."""
