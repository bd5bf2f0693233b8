"""`prove`: greedy text token for token, sampled text against its exact distribution."""
