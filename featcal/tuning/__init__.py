"""Choosing λ, ρ and α without labels."""
