"""`python -m mp_agent` is the `mp-agent` command."""

from mp_agent.cli import main

if __name__ == "__main__":
    main()
