"""The target writes: live, from a file, behind a server. Its distributions, stored."""
