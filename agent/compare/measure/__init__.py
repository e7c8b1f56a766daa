"""What is measured between a reference's tensors and a candidate's."""
