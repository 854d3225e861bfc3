"""One training loop: pretrain, tune, distil."""
