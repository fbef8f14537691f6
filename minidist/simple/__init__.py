"""The trainer that the course builds: whole, small, and equal to one process in every layout that it accepts."""
