"""Hooks on the optimizer's step and on what leads up to it: unscaling, clipping, schedulers."""
