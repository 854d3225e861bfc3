"""Several processes, several devices, number formats."""
