"""Plain immutable values that pass between the stages: rank → ring → merge → state → exporters."""
