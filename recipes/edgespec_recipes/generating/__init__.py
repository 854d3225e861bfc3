"""The target writes and reads: live, from a file, behind a server. Its distributions, stored."""
