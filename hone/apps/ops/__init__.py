"""Releases of models: gates, pruning of checkpoints, a file for llama.cpp, a repository on a hub."""
