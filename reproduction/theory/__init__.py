"""The paper's propositions, checked on real models: both sides of each, and how far they differ."""
