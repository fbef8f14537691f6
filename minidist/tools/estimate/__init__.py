"""What a layout costs, before anything runs: reads configuration, mesh and schedules, needs no rank and no torch."""
