"""Task makers: datasets of problems with checkable answers, made without a network."""
