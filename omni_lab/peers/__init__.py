"""Other servers of the same model, run beside this one: how to start them, and what they are given."""
