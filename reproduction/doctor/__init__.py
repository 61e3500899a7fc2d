"""`featcal doctor`."""
