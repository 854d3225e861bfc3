"""One verb, one file: parse, call, print."""
