"""Which optimizers are watched, with which parameters, layers and measurement plans."""
