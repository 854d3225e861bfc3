"""Both models in every format asked for, and what a token reads of each file."""
