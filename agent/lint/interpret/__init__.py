"""Follows names, values and control flow of training code, without running it.

`modules` finds the definitions of a file, `project` the files that it imports.
`AbstractInterpreter` executes a function on abstract values (`values`) and records what
it calls as a `Trace`. Functions of the same project that matter are
followed into; branches carry their conditions.
"""
