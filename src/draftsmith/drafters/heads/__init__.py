"""Small networks on the target's states: MLP speculator, Medusa, Hydra, recurrent drafter, FIRP."""
