"""Chapter 5: optimizer states, gradients and parameters shared out over the ranks that hold the same model."""
