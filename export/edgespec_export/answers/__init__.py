"""Whether a file still gives its model's answers: measured on replies of the target, said in words."""
