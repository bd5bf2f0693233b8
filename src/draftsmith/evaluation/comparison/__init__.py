"""`compare`: draft families against each other, on the same prompts and rounds."""
