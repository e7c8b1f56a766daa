"""What keeps the probe's failures, and its state of torch, away from training."""
