"""The order of the stages of a build, and its rehearsal."""
