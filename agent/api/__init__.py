"""The functions of `mp_agent`: each loads what it needs only when it is called."""
