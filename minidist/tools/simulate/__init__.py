"""Simulate a pipeline schedule: its timeline, its bubble, its drawing, the command."""
