"""Choice of λ, ρ and α without labels."""
