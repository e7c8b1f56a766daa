"""Log-probabilities of the same tokens by trainer and sampler, compared on their device."""
