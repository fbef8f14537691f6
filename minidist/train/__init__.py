"""The trainer, and how its ranks come to life."""
