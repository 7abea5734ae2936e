"""A script that never gets to a model."""

print("nothing to do")
