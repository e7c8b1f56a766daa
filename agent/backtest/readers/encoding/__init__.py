"""What log files are made of: checksums, protobuf messages."""
