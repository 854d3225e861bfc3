"""One stage of a build: where it stands, what it read, when it runs again."""
