"""Studies: arms, seeds, tables, plots."""
