"""Task makers: datasets of problems with checkable answers, built without a network."""
