"""Print where each server binary is, fetching what is missing."""

from tools.servers.binaries import main

main()
