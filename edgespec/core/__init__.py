"""What every room needs: errors, options, files, metrics, tables, progress. Imports nothing of ours."""

__version__ = "0.1.0"  # of edgespec; pyproject.toml reads it here, and so may every room
