"""Every layout against one process: loss, gradients, gradient norm and parameters. A falling loss proves nothing."""
