"""Many texts at once: for a target that writes data, not for one reader."""
