"""Drafters with one decoder layer and its own keys and values: EAGLE, EAGLE-3, and the prefix layer of Hydra++."""
