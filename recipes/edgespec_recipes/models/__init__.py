"""Model folders to models and back; first weights; packed rows; a part of the vocabulary."""
