"""The display of a run: log lines, the live view, the loss plot, the sampled text."""
