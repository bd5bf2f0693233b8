"""What drafters with weights share: training examples, losses, checkpoints, and bases to derive from."""
