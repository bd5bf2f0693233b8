"""A server under load: what is sent and when, and how the answers are measured."""
