"""Triage of failed episodes: what failed first in each, to which part that points, and one change."""
