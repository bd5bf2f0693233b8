"""From a name to a target: model, tokenizer, what is supported, and a check against the model's own code."""
