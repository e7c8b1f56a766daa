"""How many steps before the loss the other signals of a training that goes wrong fire."""
