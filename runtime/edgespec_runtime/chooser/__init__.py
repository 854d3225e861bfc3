"""The draft length: measured costs, expected acceptance, one formula."""
