"""Hugging Face model folders to modules and back."""
