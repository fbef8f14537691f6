"""Peak memory of a rank, measured and broken down by kind of tensor."""
