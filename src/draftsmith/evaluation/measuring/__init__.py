"""How fast and how well: timed decoding, intervals, interleaved trials, texts compared."""
