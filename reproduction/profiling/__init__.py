"""What a piece of work costs: time, memory of the process tree, energy of a GPU."""
