"""Processes next to the trainer (node agent, rendezvous helper), and the rank's own end."""
