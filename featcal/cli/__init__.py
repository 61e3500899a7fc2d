"""The command line `featcal`."""
