"""What a run over many nodes costs its root agent, by simulated nodes and a real root."""
