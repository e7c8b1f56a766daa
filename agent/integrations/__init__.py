"""What frameworks offer for hooking in, one module per framework, which alone imports it.

None is needed: without them, the probe's own hooks measure the same. They pass on what only the
framework knows, and write conditions into the framework's own log.
"""
