"""A server under load: what is sent, when, and what is counted of what comes back."""
