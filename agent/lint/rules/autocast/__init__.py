"""What belongs under autocast, and what does not."""
