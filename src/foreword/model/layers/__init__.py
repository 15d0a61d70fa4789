"""What the layers of transformers call instead of their own code: attention, experts, recurrent states."""
