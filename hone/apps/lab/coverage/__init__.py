"""Reports about the coverage ledger of a run, bias by dropped prompts, and their pictures."""
