"""Everything around the trainer: launching, watching, measuring, estimating, notebooks. The core imports none of it."""
