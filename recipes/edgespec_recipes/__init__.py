"""Make a drafter: torch, transformers and accelerate. Hands folders on disk to the other rooms."""
