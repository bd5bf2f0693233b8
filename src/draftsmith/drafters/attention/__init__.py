"""One decoder layer with keys and values of its own: EAGLE, EAGLE-3, and the prefix layer of Hydra++."""
