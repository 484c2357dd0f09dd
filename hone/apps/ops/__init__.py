"""What becomes of a model: gates before a release, pruning of checkpoints, a file for llama.cpp, a repository on a hub."""
