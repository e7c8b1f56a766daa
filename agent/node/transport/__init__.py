"""How the node agents of one run reach each other: rows go to the root agent over HTTP."""
