"""The name under which torch knows the backend."""

NAME = "shm"
