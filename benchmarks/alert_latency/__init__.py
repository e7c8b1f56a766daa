"""How long it takes from a NaN in a gradient to the person who is paged."""
