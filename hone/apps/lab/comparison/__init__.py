"""Statistics of comparisons: paired differences, bootstrap intervals, sequential tests, and where two runs diverge. No files are read here."""
