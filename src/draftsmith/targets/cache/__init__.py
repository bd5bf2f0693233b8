"""Keys and values of what a target has read: storage, blocks, and the nodes that a forward reads."""
