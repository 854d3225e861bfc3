"""What the target computed, kept on disk: its distributions and hidden states, and rows to learn from them."""
