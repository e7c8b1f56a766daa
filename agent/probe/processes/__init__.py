"""What runs beside the trainer: the node agent, the rendezvous helper, and the rank's end."""
