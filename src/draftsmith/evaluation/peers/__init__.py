"""Other engines beside ours, each in a process and an environment of its own."""
