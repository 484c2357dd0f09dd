"""Rewards of stored answers: rescored, compared, made into pairs."""
