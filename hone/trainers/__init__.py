"""The programs: rl and sft."""
