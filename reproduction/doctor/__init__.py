"""`featcal doctor`: whether this machine has what the project and a suite need."""
