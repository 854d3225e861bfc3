"""What every room needs: errors, options, files, metrics, tables, progress. Imports nothing of ours."""
