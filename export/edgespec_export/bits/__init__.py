"""Which tensors of a model get how many bits: measured on text, chosen under a budget."""
