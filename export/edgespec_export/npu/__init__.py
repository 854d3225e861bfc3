"""Static graphs for NPUs, and their integer form."""
