"""The CPU: which library multiplies matrices, and when freed memory returns to the system."""
