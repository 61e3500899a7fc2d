"""Baselines of FeatCal: per-task corrections of the features of an unchanged merged model."""
