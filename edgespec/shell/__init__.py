"""What the user's shell and machine say to edgespec and hear from it: folders, variables, settings, completions."""
