"""From a name to a target: model, tokenizer, the check for support, and a check against the model's own code."""
