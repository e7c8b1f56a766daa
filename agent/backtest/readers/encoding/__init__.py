"""What log files are made of: checksums, protobuf messages, JSON with NaN, answers by HTTP."""
