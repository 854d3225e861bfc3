"""One HTML page of what was built and measured, from the files that builds, bundles and measuring verbs leave."""
