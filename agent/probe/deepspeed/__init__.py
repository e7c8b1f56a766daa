"""DeepSpeed: what its engine keeps of a model's gradients, read just before it clips and steps.

The engine is read, never called: its optimizers enter collectives. `reader` knows the engine's
settings and its loss scale, `gradients` where each kind of optimizer keeps its partition and which
part of which parameter lies there, `plan` makes layers and shares of that. DeepSpeed itself is not
imported. What is not known to be right is named unsupported, and its gradients are left out.
"""
