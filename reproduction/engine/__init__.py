"""The engine of the reproduction: a specification of a model, how it is made, and its rows."""
