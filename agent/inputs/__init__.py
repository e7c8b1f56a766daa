"""What comes from outside: files, addresses, answers of servers and texts, read within limits."""
