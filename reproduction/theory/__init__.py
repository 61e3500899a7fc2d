"""The paper's propositions as computations on real models: what each says, the numbers it speaks
of, and how far off they are.
"""
