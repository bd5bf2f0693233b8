"""From a prompt to a request with a slot: what may be asked, and whose turn it is."""
